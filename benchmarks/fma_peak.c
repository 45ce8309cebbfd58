/* One core's peak of fp32 multiply-adds: 24 independent chains of the widest vector that the compiler's target has, which hides a
 * latency of up to 12 cycles at two a cycle. For benchmarks/kernels.py. */

#if defined __AVX512F__
#define BYTES 64
#elif defined __AVX__
#define BYTES 32
#else
#define BYTES 16
#endif
/* AVX2 names 16 registers: with two for the operands 12 chains fit. */
#define CHAINS (BYTES == 32 ? 12 : 24)

#if defined __aarch64__
#define KEEP(value) __asm__("" : "+w"(value))
#elif BYTES == 64
#define KEEP(value) __asm__("" : "+v"(value))
#else
#define KEEP(value) __asm__("" : "+x"(value))
#endif

typedef float vector __attribute__((vector_size(BYTES)));

/* Floating-point operations in one step of the loop. */
int fma_step_flops(void)
{
    return 2 * CHAINS * (BYTES / 4);
}

float fma_run(long steps)
{
    vector sums[CHAINS], factor = {0}, term = {0};
    factor += 0.999f;
    term += 1e-3f;
#pragma GCC unroll 24
    for (int i = 0; i < CHAINS; i++)
        sums[i] = term * (float)i;
    for (long step = 0; step < steps; step++) {
#pragma GCC unroll 24
        for (int i = 0; i < CHAINS; i++) {
            sums[i] = sums[i] * factor + term;
            KEEP(sums[i]); /* no reassociation, no closed form */
        }
    }
#pragma GCC unroll 24
    for (int i = 1; i < CHAINS; i++)
        sums[0] += sums[i];
    return sums[0][0];
}
