/* SPDX-License-Identifier: MIT
 *
 * test_training.c: threads of a caller compute every row once, in blocks. What kernels compute is
 * compared in check_kernels.c, and in tests/test_kernels.py.
 */
#include "training/training.h"

#include <pthread.h>
#include <stdatomic.h>

#include "check.h"

enum { ROWS = 5 * BN_TRAIN_ROWS + 3, MOST_THREADS = 8 };

typedef struct call {
    void (*work)(void *data);
    void *data;
} call;

static atomic_uint asked; /* threads of the last team */

static void *enter(void *context) {
    const call *c = context;
    c->work(c->data);
    return NULL;
}

static void team(void (*work)(void *), void *data, unsigned threads, unsigned flags) {
    pthread_t others[MOST_THREADS];
    call c = {work, data};
    CHECK_EQ(flags, 0);
    atomic_store(&asked, threads);
    for (unsigned i = 1; i < threads; i++)
        CHECK_EQ(pthread_create(&others[i], NULL, enter, &c), 0);
    work(data);
    for (unsigned i = 1; i < threads; i++)
        CHECK_EQ(pthread_join(others[i], NULL), 0);
}

/* args: how often each row was computed */
static void count(const void *args, size_t first, size_t end) {
    int *const *times = args;
    CHECK_EQ(first % BN_TRAIN_ROWS, 0);
    CHECK(first < end && end - first <= BN_TRAIN_ROWS);
    for (size_t i = first; i < end; i++)
        (*times)[i]++;
}

static void check_rows(size_t rows, bn_team *with, unsigned threads, unsigned expected) {
    int times[ROWS + 1] = {0}, *const args = times;
    atomic_store(&asked, 1);
    bn_training_run(count, &args, rows, with, threads);
    for (size_t i = 0; i <= ROWS; i++)
        CHECK_EQ(times[i], i < rows);
    CHECK_EQ(atomic_load(&asked), expected);
}

int main(void) {
    const size_t sizes[] = {0, 1, BN_TRAIN_ROWS, BN_TRAIN_ROWS + 1, 3 * BN_TRAIN_ROWS, ROWS};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (unsigned threads = 1; threads <= MOST_THREADS; threads++) {
            const int alone = threads == 1 || sizes[i] <= BN_TRAIN_ROWS;
            check_rows(sizes[i], team, threads, alone ? 1 : threads);
            check_rows(sizes[i], NULL, threads, 1);
        }

    bn_training_kernels table = {.norm = count};
    bn_train_product *product = NULL;
    CHECK(!bn_training_select(&table, &product, "abacus"));
    CHECK(table.norm == count);
    CHECK(bn_training_select(&table, &product, NULL) && table.entropy != NULL);
    CHECK(bn_training_select(&table, &product, "scalar"));
    CHECK(table.norm != NULL && table.norm != count && product == NULL);
    return 0;
}
