/* SPDX-License-Identifier: MIT
 *
 * test_adapters.c: what adapters add to products, compared with sums in double; an adapter alone is
 * refused if it is not for the model, also if a forged file says that it is.
 */
#define _POSIX_C_SOURCE 200809L /* posix_memalign, mkstemp */

#include <math.h>
#include <unistd.h>

#include "linear/linear.h"
#include "linear/rows.h"
#include "mask_model.h"
#include "session/turn.h"

static char path[] = "/tmp/bitnet_adapters_XXXXXX";

enum { BASE = 28, CONTEXT = 4 * 9 }; /* in the header, and in a record of STACKS */

static void write_adapter(const uint8_t *bytes, size_t size) {
    FILE *f = fopen(path, "wb");
    CHECK(f && fwrite(bytes, 1, size, f) == size && fclose(f) == 0);
}

/* --- numbers --- */

enum { ROWS = 60, MOST = DIM > FFN ? DIM : FFN };

/* What an adapter adds to output i for the input q / s. `size`: the sum of absolute values. */
static double added_to(const bn_adapter *a, const bn_tensor *w, size_t i, const int8_t *q, double s,
                       double *size) {
    const bn_low_rank *low = &a->linears[w->number];
    double all = 0;
    for (size_t r = 0; r < a->rank; r++) {
        double sum = 0;
        for (size_t k = 0; k < w->cols; k++)
            sum += low->in[r * bn_int8_row(w->cols) + k] * q[k];
        sum *= (double)low->in_scales[r] / s * (double)low->out_scales[r] *
               low->out[r * bn_int8_row(w->rows) + i];
        all += sum;
        *size += fabs(sum);
    }
    return all;
}

/* Rows with either of two adapters, and without, in an order without pattern. All have the model's
 * own. `without`: room of the same layout, for what is compared. */
static void check_products(bn_workspace *w, const bn_product *products, int n, const float *with,
                           const float *without) {
    const size_t cols = products->w->cols;
    bn_operands *in = &w->in;
    uint64_t random = 3;
    const bn_adapter *const choice[] = {NULL, &model->added[0].adapter, &model->added[1].adapter};
    for (size_t row = 0; row < ROWS; row++) {
        float x[MOST];
        for (size_t k = 0; k < cols; k++)
            x[k] = check_float(&random);
        model->kernels.vectors.quantize(&(bn_quantizing){.q = in->q + row * in->q_stride,
                                                         .s = in->s + row,
                                                         .sums = in->q_sum + row,
                                                         .x = x,
                                                         .n = cols,
                                                         .rows = 1});
        in->adapters[row] = choice[check_below(&random, row < ROWS / 2 ? 3 : 2)];
    }
    bn_product plain[3];
    for (int i = 0; i < n; i++)
        plain[i] = products[i], plain[i].y += without - with;
    in->own = NULL, in->some_adapted = 0;
    bn_linear(in, 0, ROWS, plain, n);
    in->own = &model->stack.own, in->some_adapted = 1;
    bn_linear(in, 0, ROWS, products, n);
    for (const bn_product *p = products; p < products + n; p++)
        for (size_t row = 0; row < ROWS; row++)
            for (size_t i = 0; i < p->w->rows; i++) {
                const float *y = p->y + row * p->y_stride + i, *y0 = y + (without - with);
                const int8_t *q = in->q + row * in->q_stride;
                const double scale = p->accumulate ? (double)p->scale : 1;
                double size = fabs((double)*y0), sum = 0;
                sum += added_to(in->own, p->w, i, q, (double)in->s[row], &size);
                if (in->adapters[row])
                    sum += added_to(in->adapters[row], p->w, i, q, (double)in->s[row], &size);
                CHECK_MSG(fabs((double)*y - (double)*y0 - scale * sum) < 1e-5 * size + 1e-6,
                          "row %zu, output %zu: %g more, expected %g", row, i,
                          (double)*y - (double)*y0, scale * sum);
            }
}

/* Rows of a text have the adapter of the model and that of its session, also in a copy. */
static void test_of_a_text(void) {
    float with[2][VOCAB], without[VOCAB], next[2][VOCAB];
    bn_low_rank *own = model->stack.own.linears;
    for (int32_t adapter = 0; adapter < 2; adapter++) {
        const bn_session_options o = {.adapter = adapter};
        bn_session *s, *copy;
        ok(bn_session_new(model, &o, &s));
        ok(bn_session_append(s, text, 5, BN_LOGITS_LAST, with[adapter]));
        ok(bn_session_fork(s, &copy));
        ok(bn_session_append(s, text, 1, BN_LOGITS_LAST, next[0]));
        ok(bn_session_append(copy, text, 1, BN_LOGITS_LAST, next[1]));
        CHECK(memcmp(next[0], next[1], sizeof *next) == 0);
        bn_session_free(copy);
        model->stack.own.linears = NULL;
        ok(bn_session_rewind(s, 0));
        ok(bn_session_append(s, text, 5, BN_LOGITS_LAST, without));
        model->stack.own.linears = own;
        CHECK(memcmp(with[adapter], without, sizeof without) != 0);
        bn_session_free(s);
    }
    CHECK(memcmp(with[0], with[1], sizeof without) != 0);
}

/* An own adapter of rank 3, and two of rank 5 and 2; outputs that are set, and one added to.
 * `lines`: up and down are stored as lines, which are multiplied apart. */
static void test_numbers(uint32_t lines) {
    static float y[2][3][ROWS * MOST];
    char other[] = "/tmp/bitnet_adapters_XXXXXX";
    const char *const adapters[] = {path, other};
    size_t sizes[2];
    uint8_t *bytes[2];
    kind.rank = 3;
    kind.lines = lines;
    begin(BN_MASK_CAUSAL, 0, 0);
    bn_model_close(model);
    for (size_t i = 0; i < 2; i++) {
        kind.rank = i == 0 ? 5 : 2;
        bytes[i] = tiny_adapter(recipe, file, 1 + i, &sizes[i]);
    }
    write_adapter(bytes[0], sizes[0]);
    const int fd = mkstemp(other);
    CHECK(fd >= 0 && write(fd, bytes[1], sizes[1]) == (ssize_t)sizes[1] && close(fd) == 0);
    const bn_load_options options = {.threads = 2, .n_adapters = 2, .adapters = adapters};
    ok(bn_model_open_bytes(file, file_size, &options, &model, NULL));
    bn_session *s = session(TEXT, ROWS, BN_KV_F16);
    const bn_layer *l = &model->stack.layers[1];
    const bn_product qkv[] = {{.w = &l->q, .y = y[0][0], .y_stride = MOST},
                              {.w = &l->k, .y = y[0][1], .y_stride = MOST},
                              {.w = &l->v, .y = y[0][2], .y_stride = MOST}};
    const bn_product ffn[] = {{.w = &l->ffn.networks->gate, .y = y[0][0], .y_stride = MOST},
                              {.w = &l->ffn.networks->up, .y = y[0][1], .y_stride = MOST}};
    const bn_product down = {.w = &l->ffn.networks->down,
                             .y = y[0][0],
                             .y_stride = MOST,
                             .accumulate = 1,
                             .scale = 0.25f};
    bn_workspace *w = bn_turn_begin(model);
    check_products(w, qkv, 3, y[0][0], y[1][0]);
    check_products(w, ffn, 2, y[0][0], y[1][0]);
    memset(y, 0, sizeof y);
    check_products(w, &down, 1, y[0][0], y[1][0]);
    bn_turn_end(model);
    bn_session_free(s);
    test_of_a_text();
    end();
    CHECK_EQ(unlink(other), 0);
    free(bytes[0]), free(bytes[1]);
}

/* --- refusals --- */

/* Open the model with an adapter file of which one byte has another value. */
static bn_status open_with(const uint8_t *adapter, size_t size, size_t at, int flip) {
    const char *const adapters[] = {path};
    const bn_load_options options = {.threads = 1, .n_adapters = 1, .adapters = adapters};
    uint8_t *bytes = tiny_copy(adapter, size);
    bn_model *with;
    bytes[at] ^= (uint8_t)flip;
    tiny_fix_checksums(bytes, size);
    write_adapter(bytes, size);
    const bn_status status = bn_model_open_bytes(file, file_size, &options, &with, NULL);
    if (!status)
        bn_model_close(with);
    free(bytes);
    return status;
}

static void test_refusals(void) {
    size_t size;
    kind.draft = 1;
    begin(BN_MASK_CAUSAL, 0, 0);
    kind.rank = 3;
    uint8_t *adapter = tiny_adapter(recipe, file, 1, &size);
    const size_t stacks = tiny_section(adapter, 1);
    CHECK_EQ(open_with(adapter, size, 0, 0), BN_OK);
    for (size_t i = 0; i < 20; i++) /* size and checksums of the model's weights */
        CHECK_EQ(open_with(adapter, size, BASE + i, 1), BN_ERR_MODEL);
    for (size_t i = 20; i < 32; i++) /* reserved */
        CHECK_EQ(open_with(adapter, size, BASE + i, 1), BN_ERR_VERSION);
    CHECK_EQ(open_with(adapter, size, stacks + CONTEXT, 4), BN_ERR_MODEL);
    CHECK_EQ(open_with(adapter, size, stacks + 256 + CONTEXT, 4), BN_ERR_MODEL);
    free(adapter);
    end();
}

int main(void) {
    const int fd = mkstemp(path);
    CHECK(fd >= 0 && close(fd) == 0);
    test_numbers(0);
    test_numbers(1);
    test_refusals();
    CHECK_EQ(unlink(path), 0);
    return 0;
}
