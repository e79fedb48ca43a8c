#include "lockstep/strategy/pipeline/pipeline_cut.h"

#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <unordered_set>

#include "lockstep/base/text.h"
#include "lockstep/deadline.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

constexpr int kRuns = 3;

UsageError bad_stages(const std::string& text, const std::string& why, int pieces) {
  return UsageError({.what = concat("--stages ", text, ": ", why),
                     .next = concat("the model has the pieces 0-", pieces - 1,
                                    ": give a number of stages, or the pieces of each, such as 0-", (pieces - 1) / 2,
                                    ",", (pieces - 1) / 2 + 1, "-", pieces - 1)});
}

int number_in(const std::string& word, const std::string& text, int pieces) {
  int number = 0;
  if (!parse_int(word, number) || number < 0) throw bad_stages(text, concat("\"", word, "\" is not a number"), pieces);
  return number;
}

// "3-5" or "4" out of a list of ranges, or "2" out of a list of counts.
Range range_in(const std::string& word, std::int64_t begin, bool counts, const std::string& text, int pieces) {
  if (counts) return {begin, begin + number_in(word, text, pieces)};
  const auto ends = split(word, '-');
  if (ends.size() > 2) throw bad_stages(text, concat("\"", word, "\" is not a range"), pieces);
  return {number_in(ends.front(), text, pieces), number_in(ends.back(), text, pieces) + 1};
}

Cut parse_cut(const std::string& text, int pieces) {
  const bool counts = text.find('-') == std::string::npos;
  Cut cut;
  std::int64_t next = 0;
  for (const std::string& word : split(text, ',')) {
    cut.push_back(range_in(word, next, counts, text, pieces));
    if (cut.back().begin != next || cut.back().size() < 1)
      throw bad_stages(text, concat("stage ", cut.size() - 1, " does not begin with piece ", next, ", or has none"),
                       pieces);
    next = cut.back().end;
  }
  if (next != pieces) throw bad_stages(text, concat("it ends with piece ", next - 1), pieces);
  return cut;
}

// detach() and mark: a leaf of its own, as a stage gets it from the one before.
Tensors detached(const Tensors& tensors) {
  Tensors leaves;
  for (const torch::Tensor& each : tensors) leaves.push_back(each.detach().requires_grad_(each.requires_grad()));
  return leaves;
}

double seconds_of(const Piece& piece, Tensors& tensors) {
  const Stopwatch watch;
  Tensors outputs = piece.forward(tensors), roots, gradients;
  for (const torch::Tensor& output : outputs)
    if (output.requires_grad()) {
      roots.push_back(output);
      gradients.push_back(torch::ones_like(output));
    }
  if (!roots.empty()) torch::autograd::backward(roots, gradients);
  const double seconds = watch.seconds();
  tensors = detached(outputs);
  return seconds;
}

}  // namespace

std::vector<Piece> pieces_of(const Task& task, torch::nn::Module& model) {
  if (task.stages) return task.stages(model);
  if (auto* sequential = dynamic_cast<torch::nn::SequentialImpl*>(&model)) return pieces_of(*sequential);
  throw UsageError({.what = concat("a pipeline of ", task.name, ", whose model can't be cut"),
                    .likely = "a model that is no torch::nn::Sequential, and a task without stages()",
                    .next = "set Task::stages, or choose another --strategy"});
}

StagesOption parse_stages(const std::string& text, int devices, int pieces) {
  StagesOption option{.stages = devices, .cut = {}};
  if (text.find_first_of(",-") != std::string::npos) {
    option.cut = parse_cut(text, pieces);
    option.stages = static_cast<int>(option.cut.size());
  } else if (!text.empty()) {
    option.stages = number_in(text, text, pieces);
  }
  if (option.stages < 1 || devices % option.stages != 0)
    throw bad_stages(text, concat(option.stages, " stages on ", devices, " devices: ranks are stages x replicas"),
                     pieces);
  if (option.stages > pieces) throw bad_stages(text, concat(option.stages, " stages of ", pieces, " pieces"), pieces);
  return option;
}

// best[s][end]: the smallest cost of the dearest of s stages that share the pieces before `end`.
Cut balanced_cut(const std::vector<double>& costs, int stages) {
  const std::size_t pieces = costs.size();
  if (stages < 1 || static_cast<std::size_t>(stages) > pieces)
    throw UsageError({.what = concat(stages, " stages of ", pieces, " pieces")});
  std::vector<double> before(pieces + 1);
  std::partial_sum(costs.begin(), costs.end(), before.begin() + 1);
  const double infinity = std::numeric_limits<double>::infinity();
  std::vector<std::vector<double>> best(static_cast<std::size_t>(stages) + 1,
                                        std::vector<double>(pieces + 1, infinity));
  std::vector<std::vector<std::size_t>> begin_of_last(best.size(), std::vector<std::size_t>(pieces + 1));
  best[0][0] = 0;
  for (std::size_t s = 1; s < best.size(); ++s)
    for (std::size_t end = s; end <= pieces; ++end)
      for (std::size_t begin = s - 1; begin < end; ++begin) {
        const double dearest = std::max(best[s - 1][begin], before[end] - before[begin]);
        if (dearest < best[s][end]) {
          best[s][end] = dearest;
          begin_of_last[s][end] = begin;
        }
      }
  Cut cut(static_cast<std::size_t>(stages));
  std::size_t end = pieces;
  for (std::size_t s = cut.size(); s > 0; --s) {
    const std::size_t begin = begin_of_last[s][end];
    cut[s - 1] = {static_cast<std::int64_t>(begin), static_cast<std::int64_t>(end)};
    end = begin;
  }
  return cut;
}

std::vector<double> measure_pieces(const std::vector<Piece>& pieces, torch::nn::Module& model,
                                   const torch::Tensor& data) {
  model.eval();
  std::vector<std::vector<double>> runs(pieces.size());
  for (int run = 0; run < kRuns; ++run) {
    Tensors tensors = {data};
    for (std::size_t i = 0; i < pieces.size(); ++i) runs[i].push_back(seconds_of(pieces[i], tensors));
  }
  model.train();
  model.zero_grad();
  std::vector<double> medians;
  for (std::vector<double>& times : runs) {
    std::nth_element(times.begin(), times.begin() + kRuns / 2, times.end());
    medians.push_back(times[kRuns / 2]);
  }
  return medians;
}

std::vector<std::vector<torch::Tensor>> parameters_of_stages(const std::vector<Piece>& pieces, const Cut& cut) {
  std::vector<std::vector<torch::Tensor>> stages;
  std::unordered_set<const void*> taken;
  for (const Range& range : cut) {
    std::vector<torch::Tensor> own;
    for (const torch::Tensor& parameter : parameters_of({pieces.begin() + range.begin, pieces.begin() + range.end}))
      if (taken.insert(parameter.unsafeGetTensorImpl()).second) own.push_back(parameter);
    stages.push_back(std::move(own));
  }
  return stages;
}

std::string to_string(const Cut& cut) {
  std::vector<std::string> ranges;
  for (const Range& range : cut) ranges.push_back(concat(range.begin, "-", range.end - 1));
  return join(ranges, ",");
}

}  // namespace lockstep
