/* Convolutions and matrix products by oneDNN's own C API (v3), for benchmarks/rivals.py: weights in the layout the implementation
 * wants, reordered ahead. Built with the system's compiler when it is needed. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <oneapi/dnnl/dnnl.h>

struct kernel {
    dnnl_stream_t stream;
    dnnl_primitive_t primitive;
    dnnl_exec_arg_t args[3];
    char name[128];
};

static dnnl_engine_t engine;

static int memory(dnnl_memory_t *made, const_dnnl_memory_desc_t desc)
{
    if (dnnl_memory_create(made, desc, engine, DNNL_MEMORY_ALLOCATE) != dnnl_success)
        return 0;
    void *bytes;
    if (dnnl_memory_get_data_handle(*made, &bytes) != dnnl_success)
        return 0;
    float *values = bytes;
    size_t count = dnnl_memory_desc_get_size(desc) / sizeof(float);
    for (size_t i = 0; i < count; i++)
        values[i] = (float)rand() / RAND_MAX - 0.5f;
    return 1;
}

/* The implementation of that rank in the descriptor's list, with memory for its arguments, or NULL where the list ends. */
static struct kernel *kernel_of(dnnl_primitive_desc_t pd, int rank)
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
    if (dnnl_stream_create(&made->stream, engine, dnnl_stream_default_flags) != dnnl_success
        || dnnl_primitive_create(&made->primitive, pd) != dnnl_success)
        return NULL;
    return made;
}

/* sizes: n, g, c, h, w, k, oh, ow, r, s, stride h, w, pad h, w, dilation h, w. layout: 0 any, 1 NCHW, 2 NHWC. */
struct kernel *conv_create(const int64_t *sizes, int layout, int rank)
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
    dnnl_memory_desc_create_with_tag(&xd, 4, x, dnnl_f32, tags[layout]);
    dnnl_memory_desc_create_with_tag(&yd, 4, y, dnnl_f32, tags[layout]);
    dnnl_memory_desc_create_with_tag(&wd, g > 1 ? 5 : 4, g > 1 ? grouped : plain, dnnl_f32, dnnl_format_tag_any);
    if (dnnl_convolution_forward_primitive_desc_create(&pd, engine, dnnl_forward_inference, dnnl_convolution_auto, xd, wd,
                                                       NULL, yd, strides, dilates, pads, right, NULL) != dnnl_success)
        return NULL;
    return kernel_of(pd, rank);
}

/* C, m x n, from row-major A, m x k, and B, k x n, in the layout that the implementation wants. */
struct kernel *matmul_create(int64_t m, int64_t n, int64_t k, int rank)
{
    dnnl_dims_t a = {m, k}, b = {k, n}, c = {m, n};
    dnnl_memory_desc_t ad, bd, cd;
    dnnl_primitive_desc_t pd;
    if (!engine && dnnl_engine_create(&engine, dnnl_cpu, 0) != dnnl_success)
        return NULL;
    dnnl_memory_desc_create_with_tag(&ad, 2, a, dnnl_f32, dnnl_ab);
    dnnl_memory_desc_create_with_tag(&bd, 2, b, dnnl_f32, dnnl_format_tag_any);
    dnnl_memory_desc_create_with_tag(&cd, 2, c, dnnl_f32, dnnl_ab);
    if (dnnl_matmul_primitive_desc_create(&pd, engine, ad, bd, NULL, cd, NULL) != dnnl_success)
        return NULL;
    return kernel_of(pd, rank);
}

const char *kernel_name(const struct kernel *kernel)
{
    return kernel->name;
}

int kernel_run(const struct kernel *kernel)
{
    dnnl_status_t status = dnnl_primitive_execute(kernel->primitive, kernel->stream, 3, kernel->args);
    return status == dnnl_success ? dnnl_stream_wait(kernel->stream) : status;
}
