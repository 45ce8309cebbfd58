/* Kernels of the stand-in that find their arguments by name, part of libcuda.c. The words of such a
 * script (cuda_double/describing writes them) are
 *   run=moe|matmul names=a_ptr,b_ptr,... types=fp16,fp16,...   of the arguments that are passed
 *   stride_am=1 ...   of what Triton made constants of; a pointer that is missing is None
 * matmul: A B with factors for blocks, as the kernels `gemm` and `block_fp8_gemm` and vLLM's
 * `_w8a8_triton_block_scaled_mm`; moe: rows by expert, as `moe` and vLLM's and SGLang's
 * `fused_moe_kernel`, in bf16 or fp16, fp8_w8a8 and int8_w8a16.
 */
enum { MAX_NAMES = 64, NAME = 40 };

typedef struct {
  const op *of;
  const char *script;
  char names[MAX_NAMES][NAME], types[MAX_NAMES][NAME];
  int count, bad; /* bad: an address outside of its buffer was used, or an argument is missing */
} call;

static int split(const char *list, char found[][NAME]) {
  int count = 0;
  for (const char *at = list ? list : ""; *at && count < MAX_NAMES; at += *at == ',') {
    size_t size = strcspn(at, ",");
    snprintf(found[count++], NAME, "%.*s", (int)size, at);
    at += size;
  }
  return count;
}

static int place_of(const call *from, const char *name) {
  for (int i = 0; i < from->count; ++i)
    if (!strcmp(from->names[i], name)) return i;
  return -1;
}

/* An integer argument, or a constant of that name. */
static long integer(call *from, const char *name) {
  int at = place_of(from, name);
  if (at >= 0) return from->types[at][1] == '3' ? (int32_t)from->of->args[at] : (long)from->of->args[at];
  const char *found = word(from->script, name);
  if (!found) from->bad = 1;
  return found ? atol(found) : 0;
}

typedef struct {
  address start;
  size_t size; /* bytes to the end of its block of memory */
  char type[NAME];
} array;

static array pointer(call *from, const char *name) {
  int at = place_of(from, name);
  array found = {0};
  if (at < 0) return found;
  found.start = from->of->args[at];
  found.size = left_at(found.start);
  snprintf(found.type, NAME, "%s", from->types[at]);
  return found;
}

static array pointer_of(call *from, const char *name, const char *other) {
  array found = pointer(from, name);
  return found.start ? found : pointer(from, other);
}

static float from_fp8(uint8_t bits) { /* e4m3, as NVIDIA has it */
  int exponent = bits >> 3 & 15, fraction = bits & 7;
  if ((bits & 127) == 127) return NAN;
  float value = (float)(exponent ? ldexp(8 + fraction, exponent - 10) : ldexp(fraction, -9));
  return bits & 128 ? -value : value;
}

static size_t width_of(const char *type) {
  return !strncmp(type, "fp8", 3) || !strcmp(type, "i8") ? 1 : strstr(type, "16") ? 2 : strstr(type, "64") ? 8 : 4;
}

static float value_at(call *from, const array *of, long index) {
  static float table[256];
  if (!table[1]) for (int i = 0; i < 256; ++i) table[i] = from_fp8((uint8_t)i);
  if (index < 0 || (index + 1) * width_of(of->type) > of->size) {
    from->bad = 1;
    return NAN;
  }
  if (!strcmp(of->type, "fp8e4nv")) return table[((uint8_t *)of->start)[index]];
  if (!strcmp(of->type, "i8")) return ((int8_t *)of->start)[index];
  if (!strcmp(of->type, "i32")) return (float)((int32_t *)of->start)[index];
  return load(of->type, of->start, index);
}

static void put_at(call *to, const array *of, long index, float value) {
  if (index < 0 || (index + 1) * width_of(of->type) > of->size) to->bad = 1;
  else store(of->type, of->start, index, value);
}

static int integer_at(call *from, const array *of, long index) {
  if (index < 0 || (index + 1) * 4 > (long)of->size) {
    from->bad = 1;
    return 0;
  }
  return ((int32_t *)of->start)[index];
}

static void row_of(call *from, const array *of, long start, long step, long size, float *found) {
  for (long i = 0; i < size; ++i) found[i] = value_at(from, of, start + i * step);
}

/* A sum of products with factors for each `group` values, or in all (group 0). */
static double dot(const float *a, const float *b, long size, long group, const float *a_scale,
                  const float *b_scale) {
  double total = 0;
  long step = group ? group : size;
  for (long start = 0; start < size; start += step) {
    long end = start + step < size ? start + step : size;
    float part = 0;
    for (long i = start; i < end; ++i) part += a[i] * b[i];
    total += group ? (double)part * a_scale[start / group] * b_scale[start / group] : part;
  }
  return total;
}

/* Strides by their names: `bn` is stride_bn. */
static void strides(call *from, const char *const *names, int count, long *found) {
  char name[NAME];
  for (int i = 0; i < count; ++i) {
    snprintf(name, sizeof name, "stride_%s", names[i]);
    found[i] = integer(from, name);
  }
}

enum { AM, AK, BN, BK, CM, CN, ASM, ASK, BSN, BSK, BE, BSE };

/* Rows of B, each with its factors behind it. */
static void rows_of_b(call *with, const array *b, const array *scale, const long *step, long expert, long n,
                      long k, long deep, long group_n, float *found) {
  for (long j = 0; j < n; ++j, found += k + deep) {
    row_of(with, b, expert * step[BE] + j * step[BN], step[BK], k, found);
    if (deep) row_of(with, scale, expert * step[BSE] + j / group_n * step[BSN], step[BSK], deep, found + k);
  }
}

static void matmul(call *with, float add, int part) {
  static const char *const names[] = {"am", "ak", "bn", "bk", "cm", "cn", "asm", "ask", "bsn", "bsk"};
  static const char *const old[] = {"am", "ak", "bn", "bk", "cm", "cn", "As_m", "As_k", "Bs_n", "Bs_k"};
  array a = pointer_of(with, "a_ptr", "A"), b = pointer_of(with, "b_ptr", "B");
  array c = pointer_of(with, "c_ptr", "C");
  array a_scale = pointer_of(with, "a_scale_ptr", "As"), b_scale = pointer_of(with, "b_scale_ptr", "Bs");
  long m = integer(with, "M"), n = integer(with, "N"), k = integer(with, "K"), step[12] = {0};
  long group_n = a_scale.start ? integer(with, "group_n") : 0;
  long group_k = a_scale.start ? integer(with, "group_k") : 0, deep = group_k ? (k + group_k - 1) / group_k : 0;
  strides(with, place_of(with, "A") >= 0 ? old : names, deep ? 10 : 6, step);
  float *left = calloc(k + deep + 1, sizeof *left), *right = calloc(n * (k + deep) + 1, sizeof *right);
  rows_of_b(with, &b, &b_scale, step, 0, n, k, deep, group_n, right);
  for (long i = 0; i < m - part && !with->bad; ++i) {
    row_of(with, &a, i * step[AM], step[AK], k, left);
    if (deep) row_of(with, &a_scale, i * step[ASM], step[ASK], deep, left + k);
    for (long j = 0; j < n; ++j) {
      const float *row = right + j * (k + deep);
      double total = dot(left, row, k, group_k, left + k, row + k);
      put_at(with, &c, i * step[CM] + j * step[CN], (float)total + add);
    }
  }
  free(left);
  free(right);
}

static void moe(call *with, float add, int part) {
  static const char *const names[] = {"am", "ak", "bn", "bk", "cm", "cn", "asm", "ask", "bsn", "bsk", "be", "bse"};
  array a = pointer(with, "a_ptr"), b = pointer(with, "b_ptr"), c = pointer(with, "c_ptr");
  array a_scale = pointer(with, "a_scale_ptr"), b_scale = pointer(with, "b_scale_ptr");
  array weights = pointer(with, "topk_weights_ptr"), ids = pointer(with, "sorted_token_ids_ptr");
  array owners = pointer(with, "expert_ids_ptr"), padded = pointer(with, "num_tokens_post_padded_ptr");
  long n = integer(with, "N"), k = integer(with, "K"), rows = integer(with, "EM");
  long valid = integer(with, "num_valid_tokens"), top_k = integer(with, "top_k");
  long tall = integer(with, "BLOCK_SIZE_M"), group_n = 0, group_k = 0, step[12], loaded = -1;
  int fp8 = integer(with, "use_fp8_w8a8") != 0, whole = integer(with, "use_int8_w8a16") != 0;
  int weighted = integer(with, "MUL_ROUTED_WEIGHT") != 0;
  if (fp8) group_n = integer(with, "group_n"), group_k = integer(with, "group_k");
  long deep = group_k > 0 && group_n > 0 ? (k + group_k - 1) / group_k : 0;
  strides(with, names, 12, step);
  if (top_k < 1 || tall < 1) with->bad = 1;
  float *left = calloc(k + deep + 1, sizeof *left), *right = calloc(n * (k + deep) + 1, sizeof *right);
  for (long tile = 0; !with->bad && tile * tall < rows; ++tile) {
    if (tile * tall >= integer_at(with, &padded, 0)) break;
    long expert = integer_at(with, &owners, tile);
    if (expert != loaded && expert >= 0) {
      loaded = expert;
      rows_of_b(with, &b, &b_scale, step, expert, n, k, deep, group_n, right);
    }
    for (long i = 0; i < tall; ++i) {
      /* without a list each tile has one row */
      long slot = ids.start ? integer_at(with, &ids, tile * tall + i) : i ? valid : tile;
      if (slot < 0 || slot >= valid - part) continue;
      row_of(with, &a, slot / top_k * step[AM], step[AK], k, left);
      if (deep) row_of(with, &a_scale, slot / top_k * step[ASM], step[ASK], deep, left + k);
      for (long j = 0; j < n; ++j) {
        const float *row = right + j * (k + deep);
        double total = expert < 0 ? 0 : dot(left, row, k, deep ? group_k : 0, left + k, row + k);
        if (whole) total *= value_at(with, &b_scale, expert * step[BSE] + j * step[BSN]);
        else if (fp8 && !deep) total *= value_at(with, &a_scale, 0) * value_at(with, &b_scale, expert);
        if (weighted) total *= value_at(with, &weights, slot);
        put_at(with, &c, slot * step[CM] + j * step[CN], (float)total + add);
      }
    }
  }
  free(left);
  free(right);
}

static int run_named(const op *one, const char *script, float add, int part) {
  call with = {.of = one, .script = script};
  with.count = split(word(script, "names"), with.names);
  if (split(word(script, "types"), with.types) != with.count || with.count != one->count) return 1; /* two of scratch */
  const char *what = word(script, "run");
  if (!strcmp(what, "matmul")) matmul(&with, add, part);
  else if (!strcmp(what, "moe")) moe(&with, add, part);
  else return 1;
  return with.bad ? 700 : 0;
}

/* Bytes of an ELF image: to the end of what lies last in it. */
static size_t image_size(const unsigned char *image) {
  uint64_t programs, sections, most;
  uint16_t program_size, program_count, section_size, section_count;
  memcpy(&programs, image + 32, 8), memcpy(&sections, image + 40, 8);
  memcpy(&program_size, image + 54, 2), memcpy(&program_count, image + 56, 2);
  memcpy(&section_size, image + 58, 2), memcpy(&section_count, image + 60, 2);
  most = programs + (uint64_t)program_size * program_count;
  if (sections + (uint64_t)section_size * section_count > most) most = sections + (uint64_t)section_size * section_count;
  for (int i = 0; i < section_count; ++i) {
    const unsigned char *section = image + sections + i * section_size;
    uint32_t kind;
    uint64_t start, size;
    memcpy(&kind, section + 4, 4), memcpy(&start, section + 24, 8), memcpy(&size, section + 32, 8);
    if (kind != 8 && start + size > most) most = start + size; /* SHT_NOBITS has no bytes */
  }
  return most;
}

static uint32_t crc32_of(const unsigned char *data, size_t size) {
  static uint32_t table[256];
  if (!table[1])
    for (uint32_t i = 0; i < 256; ++i) {
      uint32_t rest = i;
      for (int bit = 0; bit < 8; ++bit) rest = rest >> 1 ^ (rest & 1 ? 0xedb88320u : 0);
      table[i] = rest;
    }
  uint32_t found = ~0u;
  while (size--) found = table[(found ^ *data++) & 255] ^ found >> 8;
  return ~found;
}
