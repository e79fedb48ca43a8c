// SPDX-License-Identifier: Apache-2.0
#include "lockstep/strategy/pipeline/cut.h"

#include <algorithm>
#include <limits>
#include <map>
#include <numeric>

#include "lockstep/base/median.h"
#include "lockstep/base/require.h"
#include "lockstep/base/text.h"
#include "lockstep/collective/gpus.h"
#include "lockstep/deadline.h"
#include "lockstep/error.h"
#include "lockstep/model/parameters.h"
#include "lockstep/strategy/pipeline/stage.h"

namespace lockstep {
namespace {

// Reads --stages of a model with so many pieces.
struct StagesText {
  const std::string& text;
  int pieces;

  UsageError error(const std::string& why) const {
    return UsageError({.what = concat("--stages ", text, ": ", why),
                       .next = concat("the model has the pieces 0-", pieces - 1,
                                      ": give a number of stages, or the pieces of each, such as 0-1,2-3")});
  }

  int number(const std::string& word) const {
    int number = 0;
    if (!parse_int(word, number) || number < 0) throw error(concat("\"", word, "\" is not a number"));
    return number;
  }

  // "3-5" or "4"
  Range range(const std::string& word) const {
    const auto ends = split(word, '-');
    if (ends.size() > 2) throw error(concat("\"", word, "\" is not a range"));
    return {number(ends.front()), number(ends.back()) + 1};
  }

  Cut cut() const {
    Cut cut;
    int64_t next = 0;
    for (const std::string& word : split(text, ',')) {
      cut.push_back(range(word));
      if (cut.back().begin != next || cut.back().size() < 1)
        throw error(concat("stage ", cut.size() - 1, " does not begin with piece ", next, ", or has none"));
      next = cut.back().end;
    }
    if (next != pieces) throw error(concat("it ends with piece ", next - 1));
    return cut;
  }
};

// Forward and backward of a piece, from gradients of ones; afterwards `tensors` are the inputs of the next piece.
double seconds_of(const Piece& piece, Tensors& tensors) {
  const Stopwatch watch;
  const Tensors outputs = piece.forward(tensors);
  Tensors gradients;
  for (const Tensor& output : outputs)
    gradients.push_back(output.requires_grad() ? torch::ones_like(output) : Tensor());
  backward_from(edges_of(outputs), gradients);
  for (const Tensor& output : outputs)
    if (output.defined()) wait_for_device(output.device());
  const double seconds = watch.seconds();
  tensors = as_leaves(outputs);
  return seconds;
}

Tensors tensors_in(const Piece& piece) {
  Tensors tensors;
  for (const torch::nn::Module* module : piece.modules)
    for (const Tensors& some : {module->parameters(), module->buffers()})
      tensors.insert(tensors.end(), some.begin(), some.end());
  return tensors;
}

}  // namespace

std::vector<Piece> pieces_of(const Task& task, torch::nn::Module& model) {
  if (task.stages) return task.stages(model);
  auto* const sequential = dynamic_cast<torch::nn::SequentialImpl*>(&model);
  if (sequential != nullptr && !task.forward.takes_batch()) return pieces_of(*sequential);
  throw UsageError({.what = concat("the model of ", task.name, " can't be cut into pieces"),
                    .likely = "it is no torch::nn::Sequential, or Task::forward takes the batch, not its data alone",
                    .next = "set Task::stages, or do without --strategy pipeline and --checkpoint-activations"});
}

StagesOption parse_stages(const std::string& text, int devices, int pieces) {
  const StagesText given{text, pieces};
  StagesOption option{.stages = devices, .cut = {}};
  if (text.find_first_of(",-") != std::string::npos) {
    option.cut = given.cut();
    option.stages = option.cut.size();
  } else if (!text.empty()) {
    option.stages = given.number(text);
  }
  if (option.stages < 1 || devices % option.stages != 0)
    throw given.error(concat(option.stages, " stages on ", devices, " devices: ranks are stages x replicas"));
  if (option.stages > pieces) throw given.error(concat(option.stages, " stages of ", pieces, " pieces"));
  return option;
}

// Dynamic programming over prefixes: best[s][end] is the smallest possible cost of the dearest of s stages that share
// the pieces before `end`. The last of them begins at some `begin`, so best[s][end] is the minimum over `begin` of
// max(best[s-1][begin], cost of the pieces begin ... end-1). O(stages * pieces^2).
Cut balanced_cut(const std::vector<double>& costs, int stages) {
  const auto pieces = to_int(costs.size());
  require(stages >= 1 && stages <= pieces, concat(stages, " stages of ", pieces, " pieces"),
          "give a stage at least one piece");
  IntVector<double> before(pieces + 1);  // cost of the pieces before
  std::partial_sum(costs.begin(), costs.end(), before.begin() + 1);
  const IntVector<double> impossible(pieces + 1, std::numeric_limits<double>::infinity());
  IntVector<IntVector<double>> best(stages + 1, impossible);
  IntVector<IntVector<int>> begin_of_last(stages + 1, IntVector<int>(pieces + 1));
  best[0][0] = 0;
  for (int s = 1; s <= stages; ++s)
    for (int end = s; end <= pieces; ++end)
      for (int begin = s - 1; begin < end; ++begin) {
        const double dearest = std::max(best[s - 1][begin], before[end] - before[begin]);
        if (dearest < best[s][end]) {
          best[s][end] = dearest;
          begin_of_last[s][end] = begin;
        }
      }
  Cut cut(stages);
  for (int s = stages, end = pieces; s > 0; --s) {
    cut[s - 1] = {begin_of_last[s][end], end};
    end = begin_of_last[s][end];
  }
  return cut;
}

std::vector<double> measure_pieces(const std::vector<Piece>& pieces, torch::nn::Module& model, Tensors& tensors) {
  model.eval();
  constexpr int kRuns = 3;
  std::vector<std::vector<double>> runs(pieces.size());
  const Tensors inputs = std::move(tensors);
  for (int run = 0; run < kRuns; ++run) {
    tensors = as_leaves(inputs);
    for (size_t i = 0; i < pieces.size(); ++i) runs[i].push_back(seconds_of(pieces[i], tensors));
  }
  model.train();
  model.zero_grad();
  std::vector<double> medians;
  for (const std::vector<double>& times : runs) medians.push_back(median(times));
  return medians;
}

std::vector<Piece> pieces_in(const std::vector<Piece>& pieces, const Range& range) {
  return {pieces.begin() + range.begin, pieces.begin() + range.end};
}

Tensors through(const std::vector<Piece>& pieces, Tensors tensors) {
  for (const Piece& piece : pieces) tensors = piece.forward(tensors);
  return tensors;
}

std::string to_string(const Cut& cut) {
  std::vector<std::string> ranges;
  for (const Range& range : cut) ranges.push_back(concat(range.begin, "-", range.end - 1));
  return join(ranges, ",");
}

bool StagedTensor::is_used_by(int stage) const { return std::ranges::find(stages, stage) != stages.end(); }

StagedTensors stage_tensors(const torch::nn::Module& model, const std::vector<Piece>& pieces, const Cut& cut) {
  std::map<const void*, std::vector<int>> users;
  for (int stage = 0; stage < cut.size(); ++stage)
    for (const Piece& piece : pieces_in(pieces, cut[stage]))
      for (const Tensor& tensor : tensors_in(piece)) {
        auto& stages = users[tensor.unsafeGetTensorImpl()];
        if (stages.empty() || stages.back() != stage) stages.push_back(stage);
      }
  std::vector<int> all(to_size(cut.size()));
  std::iota(all.begin(), all.end(), 0);
  StagedTensors staged;
  const auto add = [&](const NamedTensors& tensors, bool are_buffers) {
    for (const NamedTensor& each : tensors) {
      const auto found = users.find(each.tensor.unsafeGetTensorImpl());
      staged.push_back({each, found == users.end() ? all : found->second, are_buffers});
    }
  };
  add(named_parameters(model), false);
  add(named_buffers(model), true);
  return staged;
}

std::vector<double> bytes_of(const std::vector<Piece>& pieces) {
  std::vector<double> bytes;
  for (const Piece& piece : pieces) {
    bytes.push_back(1);
    for (const Tensor& each : tensors_in(piece)) bytes.back() += to_double(each.nbytes());
  }
  return bytes;
}

}  // namespace lockstep
