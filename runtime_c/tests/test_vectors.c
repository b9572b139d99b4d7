/* SPDX-License-Identifier: MIT
 *
 * test_vectors.c: errors of the scalar float kernels, compared with the same in double.
 */
#include "check.h"
#include "kernels/kernels.h"

#include <math.h>

enum { MOST = 3000, STEPS = 1 << 14 };

static bn_vector_kernels scalar(void) {
    bn_kernels kernels;
    bn_kernels_scalar(&kernels);
    return kernels.vectors;
}

/* The norm in double. */
static void norm(double *y, const float *x, const float *gain, const float *bias, size_t n,
                 double eps, int centred) {
    double mean = 0, squares = 0;
    for (size_t i = 0; i < n && centred; i++)
        mean += (double)x[i] / (double)n;
    for (size_t i = 0; i < n; i++)
        squares += ((double)x[i] - mean) * ((double)x[i] - mean) / (double)n;
    for (size_t i = 0; i < n; i++)
        y[i] = ((double)x[i] - mean) / sqrt(squares + eps) * (double)gain[i] +
               (bias ? (double)bias[i] : 0);
}

/* Vectors around a mean that may be far larger than their deviation. fp32 represents such a mean to
 * half a unit in its last place, an error that the division by the deviation magnifies. */
static void test_norms(void) {
    const bn_vector_kernels kernels = scalar();
    static float x[MOST], gain[MOST], bias[MOST], y[MOST];
    static double expected[MOST];
    uint64_t random = 3;
    for (int round = 0; round < 400; round++) {
        const size_t n = 1 + check_below(&random, round < 100 ? 40 : MOST);
        const float mean = 4 * check_float(&random),
                    size = ldexpf(1, -(int)check_below(&random, 6));
        for (size_t i = 0; i < n; i++) {
            x[i] = mean + size * check_float(&random);
            gain[i] = check_float(&random);
            bias[i] = check_float(&random);
        }
        for (int layer = 0; layer < 2; layer++)
            for (int with = 0; with < 2; with++) {
                const bn_norming a = {.y = y,
                                      .x = x,
                                      .gain = gain,
                                      .bias = with ? bias : NULL,
                                      .n = n,
                                      .rows = 1,
                                      .eps = 1e-5f};
                CHECK((layer ? kernels.layer_norm : kernels.rms_norm)(&a));
                norm(expected, x, gain, with ? bias : NULL, n, 1e-5, layer);
                const double deviation = sqrt((double)(size * size) / 3 + 1e-5);
                const double error = 4e-7 * (layer ? 1 + fabs((double)mean) / deviation : 2);
                for (size_t i = 0; i < n; i++)
                    CHECK_MSG(fabs((double)y[i] - expected[i]) < error,
                              "%zu of %zu: %g, expected %g", i, n, (double)y[i], expected[i]);
            }
    }
}

/* x in steps of 1/STEPS, beyond the end of the polynomial; and of all magnitudes. Returns the
 * largest error, in units of max(1, |x|). */
static double gelu_error(bn_gate *gate, double (*gelu)(double)) {
    double worst = 0;
    const float one = 1;
    for (int i = 0; i < 2 * 12 * STEPS; i++)
        for (int all = 0; all < 2; all++) {
            const float x = all ? ldexpf(i % 2 ? 1.37f : -1.37f, i % 250 - 125)
                                : (float)(i - 12 * STEPS) / (float)STEPS + 1e-4f;
            float y;
            gate(&y, &x, &one, 1);
            const double error = fabs((double)y - gelu((double)x)) / fmax(1, fabs((double)x));
            worst = error > worst ? error : worst;
        }
    return worst;
}

static double exact(double x) {
    return x * erfc(-x / sqrt(2)) / 2;
}

static double with_tanh(double x) {
    return x / (1 + exp(-2 * sqrt(2 / acos(-1)) * (x + 0.044715 * x * x * x)));
}

/* Measured 8.6e-8 and 1.2e-7. */
static void test_gelus(void) {
    const bn_vector_kernels kernels = scalar();
    const double erf_error = gelu_error(kernels.gelu_erf_gate, exact);
    const double tanh_error = gelu_error(kernels.gelu_gate, with_tanh);
    printf("gelu_erf_gate is off by at most %.2e, gelu_gate by %.2e\n", erf_error, tanh_error);
    CHECK(erf_error < 1e-7 && tanh_error < 1.3e-7);
    const float x[] = {0, -0.0f, INFINITY, -INFINITY, NAN, 3, -20}, one = 1;
    float y[7];
    for (int i = 0; i < 7; i++)
        kernels.gelu_erf_gate(&y[i], &x[i], &one, 1);
    CHECK(y[0] == 0 && y[1] == 0 && isinf(y[2]) && fabsf(y[3]) < 2e-18f && isnan(y[4]));
    CHECK(y[5] < 3 && fabsf(y[6]) < 2e-18f);
}

int main(void) {
    test_norms();
    test_gelus();
    return 0;
}
