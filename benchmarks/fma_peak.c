/* One core's peak of multiply-adds in fp32, of pairs of bf16, and of words of four bytes: independent chains of the widest vectors
 * that the CPU has for them, which hides a latency of up to 12 cycles at two a cycle. For benchmarks/contest.py. */

#if defined __AVX512F__
#define BYTES 64
#elif defined __AVX__
#define BYTES 32
#else
#define BYTES 16
#endif
/* AVX2 names 16 registers: with two for the operands, and one between instructions, 12 chains fit. */
#define CHAINS(bytes) ((bytes) == 32 ? 12 : 24)

#if defined __aarch64__
#define KEEP(value) __asm__("" : "+w"(value))
#elif BYTES == 64
#define KEEP(value) __asm__("" : "+v"(value))
#else
#define KEEP(value) __asm__("" : "+x"(value))
#endif

typedef float vector __attribute__((vector_size(BYTES)));

static float fp32(long steps)
{
    vector sums[CHAINS(BYTES)], factor = {0}, term = {0};
    factor += 0.999f;
    term += 1e-3f;
#pragma GCC unroll 24
    for (int i = 0; i < CHAINS(BYTES); i++)
        sums[i] = term * (float)i;
    for (long step = 0; step < steps; step++) {
#pragma GCC unroll 24
        for (int i = 0; i < CHAINS(BYTES); i++) {
            sums[i] = sums[i] * factor + term;
            KEEP(sums[i]); /* no reassociation, no closed form */
        }
    }
#pragma GCC unroll 24
    for (int i = 1; i < CHAINS(BYTES); i++)
        sums[0] += sums[i];
    return sums[0][0];
}

typedef float (*loop)(long steps);

#if defined __x86_64__
/* Chains of one instruction that adds to %[sums] the products of the words %[x] and %[w]; %[products] is a register for its use. */
#define WORDS(name, features, bytes, registers, instruction) \
    __attribute__((target(features))) static float name(long steps) \
    { \
        typedef int words __attribute__((vector_size(bytes))); \
        words sums[CHAINS(bytes)], x = {0}, w = {0}, products; \
        x += 0x3f7e3f81; \
        w += 0x3c3d3b3a; \
        _Pragma("GCC unroll 24") for (int i = 0; i < CHAINS(bytes); i++) sums[i] = x + i; \
        for (long step = 0; step < steps; step++) { \
            _Pragma("GCC unroll 24") for (int i = 0; i < CHAINS(bytes); i++) \
                __asm__(instruction : [sums] "+" registers(sums[i]), [products] "=&" registers(products) \
                        : [x] registers(x), [w] registers(w)); \
        } \
        _Pragma("GCC unroll 24") for (int i = 1; i < CHAINS(bytes); i++) sums[0] += sums[i]; \
        return (float)sums[0][0]; \
    }
WORDS(bf16_512, "avx512bf16", 64, "v", "vdpbf16ps %[w], %[x], %[sums]")
WORDS(int8_512, "avx512vnni", 64, "v", "vpdpbusd %[w], %[x], %[sums]")
WORDS(int8_256, "avxvnni", 32, "x", "%{vex%} vpdpbusd %[w], %[x], %[sums]")
/* Bytes as numbers of 16 bits, half of a word at a time: without VNNI the instruction for bytes saturates. */
WORDS(int16_256, "avx2", 32, "x", "vpmaddwd %[w], %[x], %[products]\n\tvpaddd %[products], %[sums], %[sums]")
#define WIDEST(features, bytes, name, values) \
    if (__builtin_cpu_supports(features)) { \
        *operations = 2 * CHAINS(bytes) * (bytes) / 4 * (values); \
        return name; \
    }
#endif

/* The loop for values of so many bytes (4, 2 or 1) in the widest form that this CPU has, and the operations in one step of it. */
static loop widest(int value_bytes, long *operations)
{
    *operations = 0;
    if (value_bytes == 4) {
        *operations = 2 * CHAINS(BYTES) * (BYTES / 4);
        return fp32;
    }
#if defined __x86_64__
    if (value_bytes == 2) {
        WIDEST("avx512bf16", 64, bf16_512, 2)
    } else {
        WIDEST("avx512vnni", 64, int8_512, 4)
        WIDEST("avxvnni", 32, int8_256, 4)
        WIDEST("avx2", 32, int16_256, 2)
    }
#endif
    return 0;
}

/* Operations in one step of the loop; 0 if this CPU has no instruction for such values. */
long peak_step_operations(int value_bytes)
{
    long operations;
    widest(value_bytes, &operations);
    return operations;
}

float peak_run(int value_bytes, long steps)
{
    long operations;
    return widest(value_bytes, &operations)(steps);
}
