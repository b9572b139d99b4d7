/* SPDX-License-Identifier: MIT
 *
 * embed.c: one unit vector for a whole text: its hidden states after the final norm, pooled. A mean
 * is summed token by token, so that splitting the text does not change any bit.
 */
#include "batch.h"
#include "leave.h"
#include "session.h"
#include "turn.h"
#include "workspace.h"

/* Several texts, and the progress through them. */
typedef struct texts {
    bn_session *const *sessions;
    const int32_t *const *tokens; /* NULL: a single text of vectors */
    const float *vectors;
    const int32_t *lengths;
    int32_t n, text, at; /* next: row `at` of text `text` */
    int apart;           /* each text in turns of its own */
} texts;

static bn_text text_of(const texts *t, int32_t i) {
    return (bn_text){
        .tokens = t->tokens ? t->tokens[i] : NULL, .vectors = t->vectors, .n = t->lengths[i]};
}

static void add_row(bn_batch *b, texts *t, bn_want want) {
    const bn_text text = text_of(t, t->text);
    bn_row *row =
        bn_batch_add(b, t->sessions[t->text], text.tokens ? text.tokens[t->at] : BN_NO_TOKEN, want);
    if (!text.tokens)
        row->vector = text.vectors + (size_t)t->at * b->stack->config.dim;
    if (++t->at == text.n)
        t->text++, t->at = 0;
}

/* Whether the pooling uses the state of the text's next row. */
static bn_want wanted(const texts *t, int32_t position) {
    const int32_t pooling = t->sessions[t->text]->pooling;
    const int last = t->at + 1 == t->lengths[t->text];
    const int counts = pooling == BN_POOL_MEAN || (pooling == BN_POOL_LAST ? last : position == 0);
    return counts ? BN_WANT_POOLED : BN_WANT_NOTHING;
}

static int any_cancelled(const texts *t) {
    int any = 0;
    for (int32_t i = 0; i < t->n; i++)
        any |= bn_session_cancelled(t->sessions[i]);
    return any;
}

/* Rows of the next text for a batch with this much room, which is empty or not: at most what its
 * session may run at a time; or the whole text if rows see later positions. */
static int32_t count_rows(const texts *t, int32_t room, int empty) {
    const bn_session *s = t->sessions[t->text];
    const int32_t left = t->lengths[t->text] - t->at;
    if (s->stack->config.mask == BN_MASK_BIDIRECTIONAL)
        return empty || left <= room ? left : 0;
    return bn_smaller(left, bn_smaller(room, s->batch));
}

static void add_rows(bn_batch *b, texts *t, int32_t n) {
    bn_session *s = t->sessions[t->text];
    if (s->stack->config.mask == BN_MASK_BIDIRECTIONAL)
        s->cache.prefix = (size_t)n;
    for (int32_t position = s->position, end = position + n; position < end; position++)
        add_row(b, t, wanted(t, position));
}

/* One turn: adds texts as long as each one added is complete. */
static bn_status run_block(texts *t) {
    const bn_session *first = t->sessions[t->text];
    const int sees_all = first->stack->config.mask == BN_MASK_BIDIRECTIONAL;
    bn_batch b = bn_batch_begin(first);
    const int32_t most = sees_all ? (int32_t)b.w->room : first->batch;
    bn_status status = BN_ERR_CANCELLED;
    if (!any_cancelled(t)) {
        int whole = 1; /* the previous text is complete */
        while (whole && t->text < t->n && !(t->apart && b.n > 0)) {
            const int32_t n = count_rows(t, most - (int32_t)b.n, b.n == 0);
            if (n > 0)
                add_rows(&b, t, n);
            whole = n > 0 && t->at == 0;
        }
        status = bn_batch_run(&b);
        for (size_t row = 0; row < b.n && !status; row++) {
            bn_session *s = b.w->rows[row].session;
            s->pooled = s->position;
        }
    }
    bn_batch_end(&b);
    return status;
}

/* All turns. A value of one text ends the turn of several, which then come one by one: so those
 * before it are complete, and it is not. */
static bn_status run_texts(texts *t) {
    bn_status status = BN_OK;
    while (t->text < t->n && !status) {
        const int32_t text = t->text, at = t->at;
        status = run_block(t);
        if (status == BN_ERR_NUMERIC && !t->apart) {
            t->text = text, t->at = at, t->apart = 1;
            status = BN_OK;
        }
    }
    return status;
}

static bn_status check_text(const texts *t, int32_t i, int32_t pooling) {
    const bn_session *s = t->sessions[i];
    const bn_text text = text_of(t, i);
    const bn_status status = bn_check_text(s, &text);
    if (status)
        return status;
    if (pooling < BN_POOL_LAST || pooling > BN_POOL_FIRST)
        return BN_ERR_ARGUMENT;
    return s->position > 0 && (s->pooled != s->position || s->pooling != pooling) ? BN_ERR_STATE
                                                                                  : BN_OK;
}

/* Input of the projector; without one, the length would not matter. */
static void load_pool(const bn_session *s, float *h) {
    const float divisor = s->pooling == BN_POOL_MEAN ? (float)s->pooled : 1;
    for (size_t d = 0; d < s->stack->config.dim; d++)
        h[d] = s->pool[d] / divisor;
}

/* out[n][width] = projector · pools, whatever is not finite, in turns of as many as there is
 * scratch memory for. */
static void project(const texts *t, float *out) {
    const bn_stack *stack = t->sessions[0]->stack;
    const size_t width = bn_width(&stack->config), n = (size_t)t->n;
    for (size_t first = 0, rows; first < n; first += rows) {
        const bn_workspace *w = bn_turn_begin(t->sessions[0]->model);
        rows = bn_min(n - first, w->batch);
        for (size_t i = 0; i < rows; i++)
            load_pool(t->sessions[first + i], w->in.h + i * w->in.wide);
        bn_leave(stack, w, rows, out + first * width);
        bn_turn_end(t->sessions[0]->model);
    }
}

/* out[n][width] = the projected pools, normalized to length 1. A session whose vector is not finite
 * is left empty. */
static bn_status finish(const texts *t, float *out) {
    const bn_stack *stack = t->sessions[0]->stack;
    const size_t width = bn_width(&stack->config);
    const int projected = stack->projector.data != NULL;
    bn_status status = BN_OK;
    if (projected)
        project(t, out);
    for (int32_t i = 0; i < t->n && !status; i++, out += width) {
        bn_session *s = t->sessions[i];
        status = bn_leave_unit(&s->model->kernels, out, projected ? out : s->pool, width);
        if (status)
            (void)bn_session_cut(s, 0);
    }
    return status;
}

/* Reserve memory for the tokens of all texts, or of none. */
static bn_status reserve(const texts *t) {
    bn_status status = BN_OK;
    int32_t n = 0;
    for (; n < t->n && !status; n++)
        status = bn_session_reserve(t->sessions[n], t->lengths[n]);
    for (int32_t i = 0; i + 1 < n && status; i++) /* release it again */
        bn_cache_forget(&t->sessions[i]->cache, (size_t)t->sessions[i]->position);
    return status;
}

/* All checks come before any work. */
static bn_status embed(texts *t, bn_pooling pooling, float *out) {
    const bn_config *c = &t->sessions[0]->stack->config;
    const int32_t kind = pooling ? (int32_t)pooling : (int32_t)c->pooling;
    bn_status status = BN_OK;
    for (int32_t i = 0; i < t->n; i++) {
        if ((status = check_text(t, i, kind)))
            return status;
        for (int32_t j = 0; j < i; j++)
            if (t->sessions[j] == t->sessions[i] || t->sessions[j]->stack != t->sessions[i]->stack)
                return BN_ERR_ARGUMENT;
    }
    status = reserve(t);
    for (int32_t i = 0; i < t->n && !status; i++)
        t->sessions[i]->pooling = kind;
    if (!status)
        status = run_texts(t);
    return status || !out ? status : finish(t, out);
}

bn_status bn_embed_batch(bn_session *const *sessions, const int32_t *const *tokens,
                         const int32_t *n_tokens, int32_t n, bn_pooling pooling, float *out) {
    BN_STANDARD_FLOATS;
    if (!sessions || !tokens || !n_tokens || n < 1 || !sessions[0])
        return BN_ERR_ARGUMENT;
    return embed(&(texts){.sessions = sessions, .tokens = tokens, .lengths = n_tokens, .n = n},
                 pooling, out);
}

bn_status bn_session_embed(bn_session *s, const int32_t *tokens, int32_t n, bn_pooling pooling,
                           float *out) {
    return bn_embed_batch(&s, &tokens, &n, 1, pooling, out);
}

bn_status bn_session_embed_embeddings(bn_session *s, const float *embeddings, int32_t n,
                                      bn_pooling pooling, float *out) {
    BN_STANDARD_FLOATS;
    texts one = {.sessions = &s, .vectors = embeddings, .lengths = &n, .n = 1};
    return s ? embed(&one, pooling, out) : BN_ERR_ARGUMENT;
}
