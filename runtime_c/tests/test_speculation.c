/* SPDX-License-Identifier: MIT
 *
 * test_speculation.c: how many guesses are worth making. Most numbers are sums of powers of two, so
 * that results are exact.
 */
#include "speculation.h"

#include "check.h"

/* A shorter time counts at once, a longer one by an eighth, and caps those of fewer rows. */
static void test_times(void) {
    bn_timings t = {0};
    bn_note_time(t.pass, 3, 8);
    CHECK(t.pass[2] == 8 && t.pass[0] == 0);
    bn_note_time(t.pass, 3, 16);
    CHECK(t.pass[2] == 9);
    bn_note_time(t.pass, 2, 7);
    bn_note_time(t.pass, 3, 4);
    CHECK(t.pass[2] == 4 && t.pass[1] == 4);
    bn_note_time(t.pass, BN_TIMED_ROWS, 32);
    bn_note_time(t.pass, BN_TIMED_ROWS + 1, 1);
    CHECK(t.pass[BN_TIMED_ROWS - 1] == 32 && t.pass[2] == 4 && t.draft_round[0] == 0);
    bn_note_catch_up(&t, 2);
    bn_note_catch_up(&t, 10);
    CHECK(t.catch_up == 3);
}

static void check_plan(bn_draft_plan plan, int32_t rows, double tokens, double seconds) {
    CHECK_MSG(plan.rows == rows && plan.tokens == tokens && plan.seconds == seconds,
              "%d rows, %g tokens, %g s; expected %d, %g, %g", (int)plan.rows, plan.tokens,
              plan.seconds, (int)rows, tokens, seconds);
}

/* One guess gives 1.75 tokens, two 2.3125, three 2.73. */
static void test_plans(void) {
    static const double probabilities[] = {0.75, 0.5625, 0.421875};
    static const bn_timings timings = {.pass = {4, 5, 6, 7}, .draft_round = {0.5, 8}}, none = {0};
    const bn_draft_stats new_text = {0};
    bn_draft_budget budget = {.rows = 1, .most = 4, .tokens = 1, .drafting = 1};
    CHECK(bn_acceptance_rate(&new_text) == 0.75);
    check_plan(bn_plan_drafting(&timings, &budget, &new_text, 3), 2, 2.3125, 6 + 1 + 2 * 0.5);
    check_plan(bn_plan_drafting(&timings, &budget, &new_text, 1), 1, 1.75, 5 + 1 + 0.5);
    check_plan(bn_plan_verifying(&timings, &budget, probabilities, 3), 3, 2.734375, 7 + 1);
    CHECK_EQ(bn_plan_round(&timings, &budget, (double[]){0.75, 0.75}, 2), 1); /* of two: 8 s */
    budget.most = 2;
    check_plan(bn_plan_verifying(&timings, &budget, probabilities, 3), 1, 1.75, 5 + 1);
    budget.most = 1;
    check_plan(bn_plan_drafting(&timings, &budget, &new_text, 3), 0, 1, 4 + 1);
    budget.most = 4;
    check_plan(bn_plan_drafting(&none, &budget, &new_text, 3), 3, 2.734375, 0);
}

static void test_the_better_plan(void) {
    const bn_draft_plan few = {.tokens = 2, .seconds = 4}, many = {.tokens = 3, .seconds = 8},
                        as_fast = {.tokens = 4, .seconds = 8};
    const bn_draft_plan two = {.tokens = 2}, three = {.tokens = 3}; /* no times are known */
    CHECK(bn_plan_is_better(&few, many) && !bn_plan_is_better(&many, few));
    CHECK(bn_plan_is_better(&few, as_fast) && bn_plan_is_better(&as_fast, few));
    CHECK(!bn_plan_is_better(&two, three) && bn_plan_is_better(&three, two));
    CHECK(bn_plan_is_better(&two, two));
}

/* A guess of which the draft is half sure: such guesses were right half as often. */
static void test_a_guess(void) {
    const bn_timings timings = {.pass = {8, 8.5, 20}};
    bn_draft_stats stats = {.expected = 3, .accepted = 1};
    bn_draft_budget budget = {.rows = 1, .tokens = 1};
    double joint = 0.5;
    for (int i = 0; i < 2; i++) { /* the second is not worth its row */
        CHECK_EQ(bn_draft_take(&timings, &stats, &budget, &joint, 0.5), i == 0);
        CHECK(budget.rows == 2 && budget.tokens == 1.125 && joint == 0.125);
    }
    stats = (bn_draft_stats){.verified = 32, .expected = 32, .accepted = 32};
    bn_draft_note(&stats, 0.5, 1);
    CHECK(stats.verified == 32 && stats.expected == 31.5 && stats.accepted == 32);
    bn_draft_note(&stats, 0.5, 0);
    CHECK(stats.verified == 32 && stats.accepted == 31);
}

/* A pass of two rows without guesses takes 10 seconds, with two guesses 6 more. */
static void test_a_pass(void) {
    bn_timings timings = {.pass = {8, 10, 12, 16}, .draft_round = {1, 3}, .catch_up = 2};
    bn_draft_stats stats = {0};
    bn_draft_settle(&stats, &timings, 2, 2, 0, 0);
    CHECK(stats.spent == 0);
    bn_draft_settle(&stats, &timings, 2, 4, 1, 1); /* one of the two is another text's */
    CHECK(stats.spent == 3 - 5);
    bn_draft_settle(&stats, &timings, 2, 4, 2, 0);
    CHECK(stats.spent == -2 + 6);
    bn_charge_round(&stats, &timings, 2);
    CHECK(stats.spent == 4 + 1.5);
    bn_charge_catch_up(&stats, &timings, 3);
    CHECK(stats.spent == 5.5 + 6);
    for (int i = 0; i < 20; i++)
        bn_draft_settle(&stats, &timings, 2, 4, 2, 2);
    CHECK(stats.spent == -4 * 8); /* as much as the credit */

    /* more rows than are timed take as long as the most that are */
    stats.spent = 0;
    timings.draft_round[0] = 100;
    bn_draft_settle(&stats, &timings, BN_TIMED_ROWS, BN_TIMED_ROWS + 8, 1, 1);
    CHECK(stats.spent == -16.0 / BN_TIMED_ROWS);
}

/* The credit is 4 seconds, then a quarter of that until time has been saved. */
static void test_giving_up(void) {
    bn_timings timings = {.pass = {1}};
    bn_draft_stats stats = {.spent = 4};
    CHECK(!bn_draft_given_up(&stats, &timings) && !timings.doubted);
    stats.spent = 4.5;
    CHECK(bn_draft_given_up(&stats, &timings) && timings.doubted);
    stats.spent = 1;
    CHECK(!bn_draft_given_up(&stats, &timings) && timings.doubted);
    stats.spent = 1.5;
    CHECK(bn_draft_given_up(&stats, &timings));
    stats.spent = 0;
    CHECK(!bn_draft_given_up(&stats, &timings) && timings.doubted);
    stats.spent = -1;
    CHECK(!bn_draft_given_up(&stats, &timings) && !timings.doubted);
}

/* A pass of 1, 2 and 3 rows takes 1, 1.1 and 1.5 seconds, and so on; a round of guesses a tenth. */
static void test_draft_budget(void) {
    static const double seconds[] = {1.0, 1.1, 1.5, 1.9, 2.3};
    bn_timings timings = {0};
    bn_draft_stats good = {0}, bad = {0};
    for (int i = 0; i < 20; i++) {
        for (int32_t rows = 1; rows <= 5; rows++)
            bn_note_time(timings.pass, rows, seconds[rows - 1]);
        for (int32_t texts = 1; texts <= 2; texts++)
            bn_note_time(timings.draft_round, texts, 0.1);
        bn_draft_note(&good, 0.8, 1);
        bn_draft_note(&bad, 0.8, 0);
    }
    const double likely = bn_acceptance_rate(&good), probabilities[] = {likely, likely, 0.01};
    double joint = 1;
    bn_draft_budget alone = {.rows = 1, .most = 5, .tokens = 1};
    CHECK_EQ(bn_plan_round(&timings, &alone, probabilities, 1), 1);
    CHECK(!bn_draft_take(&timings, &good, &alone, &joint, 0.05)); /* a row for a gain of a
                                                                   * twentieth of a token */
    CHECK(bn_draft_take(&timings, &good, &alone, &joint, 0.9));
    CHECK(alone.rows == 2 && alone.tokens > 1.8 && joint > 0.8 && joint <= 1);
    alone.drafting = 0.1;
    CHECK_EQ(bn_plan_round(&timings, &alone, &joint, 1), 1); /* tokens per second: 1.6, then 1.7 */
    alone.most = 2;
    CHECK_EQ(bn_plan_round(&timings, &alone, &joint, 1), 0); /* no row is left */

    /* With other texts in the pass a row costs more: neither one guess nor two are worth their
     * round. If the third row is as fast as the second, two are. */
    bn_draft_budget two = {.rows = 2, .most = 5, .tokens = 2};
    const double few[] = {0.6, 0.6};
    CHECK_EQ(bn_plan_round(&timings, &two, few, 2), 0);
    timings.pass[2] = timings.pass[3] = 1.3;
    CHECK_EQ(bn_plan_round(&timings, &two, few, 2), 2);
    CHECK_EQ(bn_plan_round(&timings, &two, probabilities, 3), 2);
    bn_note_time(timings.pass, 5, 1.2); /* so fewer rows cannot take longer */
    CHECK(timings.pass[4] <= 1.2 && timings.pass[2] <= 1.2 && timings.pass[0] <= 1.0);
    int32_t tried = 0;
    for (int i = 0; i < 640; i++)
        tried += bn_draft_retry(&bad);
    CHECK_EQ(tried, 10);
}

/* A round takes 0.1 seconds, a row of keeping up 0.01; a pass of two rows takes 0.2 seconds more
 * than one of one row. */
static void test_account(void) {
    bn_timings timings = {.pass = {1, 1.2}, .draft_round = {0.1}, .catch_up = 0.01};
    bn_draft_stats wrong = {0}, right = {0}, idle = {0}, next = {0};
    int32_t passes = 0, rows = 0;
    for (; !bn_draft_given_up(&wrong, &timings); passes++) {
        bn_charge_round(&wrong, &timings, 1);
        bn_draft_settle(&wrong, &timings, 1, 2, 1, 0);
    }
    CHECK(passes == 14 && timings.doubted); /* a credit of 4 seconds */
    for (; !bn_draft_given_up(&idle, &timings); rows += 16)
        bn_charge_catch_up(&idle, &timings, 16);
    CHECK_EQ(rows, 112); /* the next text's credit is 1 second */
    for (int i = 0; i < 1000; i++) {
        bn_charge_round(&right, &timings, 1);
        bn_draft_settle(&right, &timings, 1, 2, 1, 1);
    }
    CHECK(!bn_draft_given_up(&right, &timings) && !timings.doubted);
    for (passes = 0; !bn_draft_given_up(&right, &timings); passes++) {
        bn_charge_round(&right, &timings, 1);
        bn_draft_settle(&right, &timings, 1, 2, 1, 0);
    }
    CHECK(passes < 30); /* although it was right a thousand times */
    bn_charge_catch_up(&next, &timings, 1);
    CHECK(!bn_draft_given_up(&next, &timings));
    CHECK(!bn_draft_given_up(&wrong, &(bn_timings){0})); /* no times are known */
}

int main(void) {
    test_times();
    test_plans();
    test_the_better_plan();
    test_a_guess();
    test_a_pass();
    test_giving_up();
    test_draft_budget();
    test_account();
    return 0;
}
