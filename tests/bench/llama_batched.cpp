// Speed of llama.cpp with several sequences in one batch, as `tests.bench.batched` measures Tandem's:
// greedy tokens, a prompt of random tokens for each sequence, one thread for each core.
//
//     g++ -O2 -I LLAMA/include -I LLAMA/ggml/include tests/bench/llama_batched.cpp \
//         -L BUILD/bin -lllama -lggml -lggml-base -Wl,-rpath,BUILD/bin -o llama_batched
//     ./llama_batched MODEL.gguf [TOKENS] [THREADS]
//
// LLAMA is llama.cpp's source, and BUILD a folder that it was built in with shared libraries.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "llama.h"

static const int PROMPT = 32, MOST = 8;

static void add(llama_batch & batch, llama_token token, int position, int sequence, bool wanted) {
    const int at = batch.n_tokens++;
    batch.token[at] = token;
    batch.pos[at] = position;
    batch.n_seq_id[at] = 1;
    batch.seq_id[at][0] = sequence;
    batch.logits[at] = wanted;
}

static llama_token likeliest(llama_context * context, int row, int n_vocab) {
    const float * logits = llama_get_logits_ith(context, row);
    return (llama_token) (std::max_element(logits, logits + n_vocab) - logits);
}

// Return the tokens per second of n sequences, without their prompts.
static double speed(llama_context * context, llama_batch & batch, int n_vocab, int n, int n_tokens) {
    llama_memory_clear(llama_get_memory(context), true);
    std::srand(7);
    std::vector<llama_token> last(n);
    for (int sequence = 0; sequence < n; sequence++) {
        batch.n_tokens = 0;
        for (int at = 0; at < PROMPT; at++) {
            add(batch, 10 + std::rand() % 800, at, sequence, at == PROMPT - 1);
        }
        if (llama_decode(context, batch)) { std::exit(1); }
        last[sequence] = likeliest(context, PROMPT - 1, n_vocab);
    }
    const auto begun = std::chrono::steady_clock::now();
    for (int step = 0; step < n_tokens; step++) {
        batch.n_tokens = 0;
        for (int sequence = 0; sequence < n; sequence++) {
            add(batch, last[sequence], PROMPT + step, sequence, true);
        }
        if (llama_decode(context, batch)) { std::exit(1); }
        for (int sequence = 0; sequence < n; sequence++) {
            last[sequence] = likeliest(context, sequence, n_vocab);
        }
    }
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begun;
    return n * n_tokens / seconds.count();
}

int main(int n_arguments, char ** arguments) {
    if (n_arguments < 2) { std::fprintf(stderr, "a model is missing\n"); return 2; }
    const int n_tokens = n_arguments > 2 ? std::atoi(arguments[2]) : 64;
    const int n_threads = n_arguments > 3 ? std::atoi(arguments[3]) : 2;
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    llama_backend_init();
    llama_model * model = llama_model_load_from_file(arguments[1], llama_model_default_params());
    if (!model) { std::fprintf(stderr, "the model cannot be loaded\n"); return 1; }
    llama_context_params params = llama_context_default_params();
    params.n_ctx = MOST * (PROMPT + n_tokens + 8);
    params.n_seq_max = MOST;
    params.n_threads = params.n_threads_batch = n_threads;
    llama_context * context = llama_init_from_model(model, params);
    if (!context) { std::fprintf(stderr, "there is no context\n"); return 1; }
    const int n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
    llama_batch batch = llama_batch_init(PROMPT, 0, 1);
    speed(context, batch, n_vocab, 1, 8);
    std::printf("sequences  tokens/s  one before  one behind  ratio\n");
    for (int n = 2; n <= MOST; n *= 2) {
        const double before = speed(context, batch, n_vocab, 1, n_tokens);
        const double together = speed(context, batch, n_vocab, n, n_tokens);
        const double behind = speed(context, batch, n_vocab, 1, n_tokens);
        std::printf("%9d  %8.1f  %10.1f  %10.1f  %5.2f\n", n, together, before, behind,
                    2 * together / (before + behind));
    }
    llama_batch_free(batch);
    llama_free(context);
    llama_model_free(model);
}
