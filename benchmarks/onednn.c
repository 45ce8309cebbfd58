/* Convolutions and matrix products by oneDNN's own C API (v3), for benchmarks/rivals.py: weights in the layout the implementation
 * wants, reordered ahead. Built with the system's compiler when it is needed. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <oneapi/dnnl/dnnl.h>

struct kernel {
    dnnl_stream_t stream;
    dnnl_primitive_t primitive;
    int count; /* of the arguments */
    dnnl_exec_arg_t args[5];
    char name[128];
};

/* Types of input, weights and answer, by the kind: fp32, bf16, bytes, whose sums are scaled. */
enum { BYTES = 2 };
static const dnnl_data_type_t types[][3] = {{dnnl_f32, dnnl_f32, dnnl_f32},
                                            {dnnl_bf16, dnnl_bf16, dnnl_bf16},
                                            {dnnl_u8, dnnl_s8, dnnl_u8}};
static dnnl_engine_t engine;

/* Memory of random values: numbers between -0.5 and 0.5, whole ones from the whole range of bytes. */
static int memory(dnnl_memory_t *made, const_dnnl_memory_desc_t desc)
{
    if (dnnl_memory_create(made, desc, engine, DNNL_MEMORY_ALLOCATE) != dnnl_success)
        return 0;
    void *start;
    dnnl_data_type_t type;
    if (dnnl_memory_get_data_handle(*made, &start) != dnnl_success
        || dnnl_memory_desc_query(desc, dnnl_query_data_type, &type) != dnnl_success)
        return 0;
    size_t size = dnnl_memory_desc_get_size(desc), step = dnnl_data_type_size(type);
    char *values = start;
    for (size_t i = 0; i + step <= size; i += step) {
        float value = (float)rand() / RAND_MAX - 0.5f;
        char *half = (char *)&value + 2; /* the upper half of a number in fp32 is one in bf16 */
        int whole = (int)(254 * value);
        memcpy(values + i, type == dnnl_f32 ? (char *)&value : type == dnnl_bf16 ? half : (char *)&whole, step);
    }
    return 1;
}

/* Scales for each channel of the weights, whose axes are in the mask, and one for the answer; none but for bytes. */
static dnnl_primitive_attr_t scaled(int kind, int mask)
{
    dnnl_primitive_attr_t made = NULL;
    if (kind == BYTES && dnnl_primitive_attr_create(&made) == dnnl_success) {
        dnnl_primitive_attr_set_scales_mask(made, DNNL_ARG_WEIGHTS, mask);
        dnnl_primitive_attr_set_scales_mask(made, DNNL_ARG_DST, 0);
    }
    return made;
}

/* The implementation of that rank in the descriptor's list, with memory for its arguments, or NULL where the list ends. With
 * scales if there are `channels`. */
static struct kernel *kernel_of(dnnl_primitive_desc_t pd, int64_t channels, int rank)
{
    while (rank-- > 0)
        if (dnnl_primitive_desc_next_impl(pd) != dnnl_success)
            return NULL;
    struct kernel *made = calloc(1, sizeof *made);
    const char *name = "";
    dnnl_query_t what[] = {dnnl_query_src_md, dnnl_query_weights_md, dnnl_query_dst_md};
    int as[] = {DNNL_ARG_SRC, DNNL_ARG_WEIGHTS, DNNL_ARG_DST};
    if (!made)
        return NULL;
    dnnl_primitive_desc_query(pd, dnnl_query_impl_info_str, 0, &name);
    strncpy(made->name, name, sizeof made->name - 1);
    for (int i = 0; i < 3; i++) {
        made->args[i].arg = as[i];
        if (!memory(&made->args[i].memory, dnnl_primitive_desc_query_md(pd, what[i], 0)))
            return NULL;
    }
    made->count = 3;
    for (int i = 0; i < 2 && channels; i++) {
        dnnl_dims_t extent = {i ? 1 : channels};
        dnnl_memory_desc_t scales;
        made->args[made->count].arg = DNNL_ARG_ATTR_SCALES | (i ? DNNL_ARG_DST : DNNL_ARG_WEIGHTS);
        if (dnnl_memory_desc_create_with_tag(&scales, 1, extent, dnnl_f32, dnnl_a) != dnnl_success
            || !memory(&made->args[made->count++].memory, scales))
            return NULL;
    }
    if (dnnl_stream_create(&made->stream, engine, dnnl_stream_default_flags) != dnnl_success
        || dnnl_primitive_create(&made->primitive, pd) != dnnl_success)
        return NULL;
    return made;
}

/* sizes: n, g, c, h, w, k, oh, ow, r, s, stride h, w, pad h, w, dilation h, w. layout: 0 any, 1 NCHW, 2 NHWC.
 * kind: 0 fp32, 1 bf16, 2 bytes. */
struct kernel *conv_create(const int64_t *sizes, int layout, int kind, int rank)
{
    int64_t n = sizes[0], g = sizes[1], c = sizes[2], k = sizes[5];
    dnnl_dims_t x = {n, c, sizes[3], sizes[4]}, y = {n, k, sizes[6], sizes[7]};
    dnnl_dims_t plain = {k, c, sizes[8], sizes[9]}, grouped = {g, k / g, c / g, sizes[8], sizes[9]};
    dnnl_dims_t strides = {sizes[10], sizes[11]}, pads = {sizes[12], sizes[13]};
    dnnl_dims_t dilates = {sizes[14] - 1, sizes[15] - 1};
    dnnl_dims_t right = {(y[2] - 1) * sizes[10] + (sizes[8] - 1) * sizes[14] + 1 - x[2] - pads[0],
                         (y[3] - 1) * sizes[11] + (sizes[9] - 1) * sizes[15] + 1 - x[3] - pads[1]};
    dnnl_format_tag_t tags[] = {dnnl_format_tag_any, dnnl_nchw, dnnl_nhwc};
    dnnl_memory_desc_t xd, wd, yd;
    dnnl_primitive_desc_t pd;
    if (!engine && dnnl_engine_create(&engine, dnnl_cpu, 0) != dnnl_success)
        return NULL;
    dnnl_memory_desc_create_with_tag(&xd, 4, x, types[kind][0], tags[layout]);
    dnnl_memory_desc_create_with_tag(&yd, 4, y, types[kind][2], tags[layout]);
    dnnl_memory_desc_create_with_tag(&wd, g > 1 ? 5 : 4, g > 1 ? grouped : plain, types[kind][1], dnnl_format_tag_any);
    if (dnnl_convolution_forward_primitive_desc_create(&pd, engine, dnnl_forward_inference, dnnl_convolution_auto, xd, wd,
                                                       NULL, yd, strides, dilates, pads, right, scaled(kind, g > 1 ? 3 : 1))
        != dnnl_success)
        return NULL;
    return kernel_of(pd, kind == BYTES ? k : 0, rank);
}

/* C, m x n, from row-major A, m x k, and B, k x n, in the layout that the implementation wants. */
struct kernel *matmul_create(int64_t m, int64_t n, int64_t k, int kind, int rank)
{
    dnnl_dims_t a = {m, k}, b = {k, n}, c = {m, n};
    dnnl_memory_desc_t ad, bd, cd;
    dnnl_primitive_desc_t pd;
    if (!engine && dnnl_engine_create(&engine, dnnl_cpu, 0) != dnnl_success)
        return NULL;
    dnnl_memory_desc_create_with_tag(&ad, 2, a, types[kind][0], dnnl_ab);
    dnnl_memory_desc_create_with_tag(&bd, 2, b, types[kind][1], dnnl_format_tag_any);
    dnnl_memory_desc_create_with_tag(&cd, 2, c, types[kind][2], dnnl_ab);
    if (dnnl_matmul_primitive_desc_create(&pd, engine, ad, bd, NULL, cd, scaled(kind, 2)) != dnnl_success)
        return NULL;
    return kernel_of(pd, kind == BYTES ? n : 0, rank);
}

const char *kernel_name(const struct kernel *kernel)
{
    return kernel->name;
}

int kernel_run(const struct kernel *kernel)
{
    dnnl_status_t status = dnnl_primitive_execute(kernel->primitive, kernel->stream, kernel->count, kernel->args);
    return status == dnnl_success ? dnnl_stream_wait(kernel->stream) : status;
}
