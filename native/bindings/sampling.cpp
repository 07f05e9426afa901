// topg._native.SamplerState and Sampler, and the sampling kernels for tests.
#include "sampling/sampler.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <mutex>
#include <utility>

#include "bindings/arrays.h"
#include "bindings/bindings.h"
#include "bindings/kernel_call.h"
#include "engine/engine.h"
#include "sampling/random_numbers.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace topg {
namespace {

using States = std::vector<const SamplerState*>;

// ---- requests -----------------------------------------------------------------------------------------------------------

std::vector<int> sorted(std::vector<int> tokens) {
  std::sort(tokens.begin(), tokens.end());
  tokens.erase(std::unique(tokens.begin(), tokens.end()), tokens.end());
  return tokens;
}

void make_state(SamplerState* self, int vocab, const Vector<int32_t>& prompt, uint64_t seed, bool greedy, double temperature,
                int top_k, double top_p, double min_p, double repetition_penalty, double presence_penalty,
                double frequency_penalty, const std::vector<std::pair<int, double>>& biases, const std::vector<int>& banned,
                const std::vector<int>& exclusive, const std::vector<int>& end_tokens, int min_tokens, int logprobs) {
  SamplingSettings settings;
  settings.seed = seed, settings.greedy = greedy, settings.temperature = temperature;
  settings.top_k = top_k, settings.top_p = top_p, settings.min_p = min_p;
  settings.repetition_penalty = repetition_penalty;
  settings.presence_penalty = presence_penalty, settings.frequency_penalty = frequency_penalty;
  for (const auto& [token, bias] : biases) settings.biases.push_back({token, bias});
  settings.banned = banned, settings.exclusive = sorted(exclusive), settings.end_tokens = end_tokens;
  settings.min_tokens = min_tokens, settings.logprobs = logprobs;
  new (self) SamplerState(std::move(settings), vocab, prompt.data(), prompt.size());
}

void allow(SamplerState& state, const Vector<uint32_t>& words) {
  require(words.size() == size_t(state.vocab() + 31) / 32,
          "allowed tokens have " + std::to_string(words.size()) + " words; a vocabulary of " + std::to_string(state.vocab()) +
              " needs one for 32 tokens");
  state.allow(words.data());
}

// The list's objects stay alive as long as the caller holds the list.
States states_of(const nb::list& list, size_t rows, int vocab) {
  require(list.size() == rows,
          std::to_string(list.size()) + " states were given for " + std::to_string(rows) + " rows of logits");
  States states;
  for (nb::handle item : list) {
    require(nb::isinstance<SamplerState>(item), "states must be SamplerState objects");
    states.push_back(nb::cast<const SamplerState*>(item));
    require(states.back()->vocab() == vocab,
            "every state must be of the model's vocabulary, " + std::to_string(vocab) + " tokens");
  }
  return states;
}

// ---- results ------------------------------------------------------------------------------------------------------------

// A token; or (token, log-probability, [(id, log-probability), ..]) with log-probabilities; or what is wrong, as a string.
nb::object result_of(const SampledToken& sampled, const SamplerState& state) {
  if (sampled.error == SampleError::kUnusable) return nb::str("unusable");
  if (sampled.error == SampleError::kNoToken) return nb::str("no token");
  if (state.settings().logprobs < 0) return nb::int_(sampled.token);
  nb::list top;
  for (int i = 0; i < sampled.top_count; ++i) top.append(nb::make_tuple(sampled.top_tokens[i], sampled.top_logprobs[i]));
  return nb::make_tuple(sampled.token, sampled.logprob, top);
}

nb::list results_of(const std::vector<SampledToken>& sampled, const States& states) {
  nb::list results;
  for (size_t row = 0; row < sampled.size(); ++row) results.append(result_of(sampled[row], *states[row]));
  return results;
}

nb::list sample_matrix(const std::string& isa, const Matrix<float>& logits, const nb::list& list) {
  const int vocab = checked_int(logits.shape(1), "the vocabulary");
  const States states = states_of(list, logits.shape(0), vocab);
  std::vector<SampledToken> sampled(states.size());
  call_kernels(isa, [&](const Kernels& kernels) {
    const SamplerScratch scratch(vocab);
    sample_rows(kernels, {logits.data(), vocab, states.data(), sampled.data()}, 0, int(states.size()), scratch);
  });
  return results_of(sampled, states);
}

// ---- steps --------------------------------------------------------------------------------------------------------------

// Runs an engine's steps and draws from their logits, inside the engine.
class Sampler {
 public:
  explicit Sampler(Engine& engine) : engine_(engine) {
    require(engine.workspace_bytes() != 0, "the engine must be finished before it can be sampled from");
    for (int thread = 0; thread < engine.pool().size(); ++thread) scratch_.emplace_back(engine.model().vocab);
  }

  std::vector<SampledToken> run(const StepArrays& arrays, const States& states) {
    engine_.pool().check_process();
    const std::lock_guard<std::mutex> lock(mutex_);
    std::vector<SampledToken> sampled(states.size());
    if (std::all_of(states.begin(), states.end(), [](const SamplerState* state) { return state->takes_best(); })) {
      take_best(arrays, &sampled);
    } else {
      draw(arrays, states, &sampled);
    }
    return sampled;
  }

  const Engine& engine() const { return engine_; }

 private:
  void take_best(const StepArrays& arrays, std::vector<SampledToken>* sampled) {
    std::vector<Best> best(sampled->size());
    engine_.run(arrays, {nullptr, best.data()});
    for (size_t row = 0; row < best.size(); ++row) {
      SampledToken& out = (*sampled)[row];
      out.token = best[row].channel;
      if (best[row].unusable || out.token < 0) out.error = SampleError::kUnusable;
    }
  }

  void draw(const StepArrays& arrays, const States& states, std::vector<SampledToken>* sampled) {
    const int rows = int(states.size()), threads = engine_.pool().size(), vocab = engine_.model().vocab;
    const SampleRows out = {engine_.logits(), vocab, states.data(), sampled->data()};
    engine_.run(arrays, {engine_.logits(), nullptr}, [&](int thread) {
      const Range mine = share(rows, thread, threads);
      sample_rows(engine_.kernels(), out, mine.begin, mine.end, scratch_[size_t(thread)]);
    });
  }

  Engine& engine_;
  std::vector<SamplerScratch> scratch_;
  std::mutex mutex_;  // of the scratch and of the engine's logits
};

template <class T>
Span<T> span(const Vector<T>& array) {
  return {array.data(), array.size()};
}

nb::list run(Sampler& sampler, const Vector<int32_t>& tokens, const Vector<int32_t>& starts, const Vector<int32_t>& counts,
             const Vector<int32_t>& page_offsets, const Vector<int32_t>& pages, const Vector<uint8_t>& wanted,
             const nb::list& list) {
  const StepArrays arrays = {span(tokens), span(starts), span(counts), span(page_offsets), span(pages), span(wanted)};
  const Engine& engine = sampler.engine();
  const States states = states_of(list, size_t(engine.output_rows(arrays)), engine.model().vocab);
  std::vector<SampledToken> sampled;
  {
    nb::gil_scoped_release release;
    sampled = sampler.run(arrays, states);
  }
  return results_of(sampled, states);
}

// ---- for tests ----------------------------------------------------------------------------------------------------------

nb::ndarray<nb::numpy, double> weights_of(const std::string& isa, const Vector<double>& logits, double maximum, double temperature) {
  const int count = checked_int(checked_size(logits, "logits").size(), "logits");
  auto weights = new_vector<double>(size_t(count));
  std::vector<double> sums(size_t(count) / kSampleRun + 1);
  call_kernels(isa, [&](const Kernels& kernels) {
    kernels.sampling.weights(logits.data(), count, maximum, temperature, weights.data(), sums.data());
  });
  return weights;
}

}  // namespace

void bind_sampling(nb::module_& module) {
  nb::class_<SamplerState>(module, "SamplerState", "What sampling remembers of one request.")
      .def("__init__", make_state, nb::kw_only(), "vocab"_a, "prompt"_a, "seed"_a, "greedy"_a, "temperature"_a, "top_k"_a,
           "top_p"_a, "min_p"_a, "repetition_penalty"_a, "presence_penalty"_a, "frequency_penalty"_a, "biases"_a, "banned"_a,
           "exclusive"_a, "end_tokens"_a, "min_tokens"_a, "logprobs"_a)
      .def("record", &SamplerState::record, "token"_a, "Note that a token was generated.")
      .def("allow", allow, "words"_a, "Allow only tokens whose bit is set: token t has bit t % 32 of word t // 32.")
      .def("allow_all", [](SamplerState& self) { self.allow(nullptr); })
      .def_prop_ro("generated", &SamplerState::generated);
  nb::class_<Sampler>(module, "Sampler", "Runs a finished engine's steps and draws from their logits.")
      .def(nb::init<Engine&>(), "engine"_a, nb::keep_alive<1, 2>())
      .def("run", run, "tokens"_a, "starts"_a, "counts"_a, "page_offsets"_a, "pages"_a, "wanted"_a, "states"_a,
           "One result for each row wanted: a token, or (token, log-probability, [(id, log-probability), ..]), or a string "
           "that says what is wrong with the row.");
  module.def("sample", sample_matrix, "isa"_a, "logits"_a, "states"_a, "Draws from each row of logits, as Sampler.run does.");
  module.def("sampling_weights", weights_of, "isa"_a, "logits"_a, "maximum"_a, "temperature"_a);
  module.def("uniform", uniform, "seed"_a, "index"_a, "The number in [0, 1) that decides a request's output token `index`.");
}

}  // namespace topg
