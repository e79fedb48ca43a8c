// SPDX-License-Identifier: Apache-2.0
#include "bench/plan_sleeping.h"

#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include <torch/csrc/autograd/custom_function.h>

#include "lockstep/strategy/pipeline/cut.h"

namespace lockstep::bench {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// The kernel wakes a thread some tens of microseconds too late: the next sleep is shorter by that.
void sleep_for(double seconds) {
  using Clock = std::chrono::steady_clock;
  thread_local Clock::duration late{};
  const auto end =
      Clock::now() - late + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  std::this_thread::sleep_until(end);
  late = Clock::now() - end;
}

struct Shape {
  std::vector<std::int64_t> sizes;
  torch::TensorOptions options;
};
using Shapes = std::vector<Shape>;

// What pieces return, by their number and the samples; found by running each once.
class KnownShapes {
 public:
  const Shapes& of(std::size_t number, const Piece& piece, const Tensors& inputs) {
    const std::lock_guard lock(mutex_);
    const auto [found, is_new] = known_.try_emplace({number, inputs.front().size(0)});
    if (!is_new) return found->second;
    const torch::NoGradGuard no_grad;
    for (const torch::Tensor& output : piece.forward(inputs))
      found->second.push_back({output.sizes().vec(), output.options()});
    return found->second;
  }

 private:
  std::mutex mutex_;
  std::map<std::pair<std::size_t, std::int64_t>, Shapes> known_;
};

// Inputs and parameters in, outputs out; backward returns a gradient for each input that wants one.
class Sleep : public torch::autograd::Function<Sleep> {
 public:
  static variable_list forward(AutogradContext* context, torch::TensorList inputs, const Shapes* shapes,
                               double forward_seconds, double backward_seconds) {
    context->saved_data["seconds"] = backward_seconds;
    context->save_for_backward(inputs.vec());
    variable_list outputs;
    for (const Shape& shape : *shapes) outputs.push_back(torch::zeros(shape.sizes, shape.options));
    sleep_for(forward_seconds);
    return outputs;
  }

  static variable_list backward(AutogradContext* context, const variable_list& /*gradients*/) {
    constexpr std::size_t kOthers = 3;  // arguments of forward() that are no tensors
    variable_list gradients;
    for (const torch::Tensor& input : context->get_saved_variables())
      gradients.push_back(input.requires_grad() ? torch::zeros_like(input) : torch::Tensor());
    gradients.resize(gradients.size() + kOthers);
    sleep_for(context->saved_data["seconds"].toDouble());
    return gradients;
  }
};

std::vector<Piece> sleeping_pieces(const Task& task, torch::nn::Module& model, const plan::Profile& profile,
                                   const std::shared_ptr<KnownShapes>& shapes) {
  double all = 0;
  for (const plan::PieceTimes& piece : profile.pieces) all += piece.seconds;
  std::vector<Piece> pieces = pieces_of(task, model);
  for (std::size_t number = 0; number < pieces.size(); ++number)
    pieces[number].forward = [piece = pieces[number], number, shapes, times = curve_alone(profile),
                              share = profile.pieces.at(number).seconds / all](const Tensors& inputs) -> Tensors {
      Tensors with_parameters = inputs;
      for (const torch::Tensor& parameter : parameters_of({piece})) with_parameters.push_back(parameter);
      const plan::StepTimes whole = plan::times_for(times, static_cast<double>(inputs.front().size(0)));
      return Sleep::apply(torch::TensorList(with_parameters), &shapes->of(number, piece, inputs), share * whole.forward,
                          share * whole.backward);
    };
  return pieces;
}

}  // namespace

Task sleeping_task(const Task& task, const plan::Profile& profile) {
  Task sleeping = task;
  sleeping.stages = [task, profile, shapes = std::make_shared<KnownShapes>()](torch::nn::Module& model) {
    return sleeping_pieces(task, model, profile, shapes);
  };
  sleeping.forward = [stages = sleeping.stages](torch::nn::Module& model, const torch::Tensor& data) {
    return run_pieces(stages(model), data);
  };
  sleeping.loss = [](const torch::Tensor& output, const torch::Tensor& /*target*/) { return output.reshape(-1)[0]; };
  return sleeping;
}

}  // namespace lockstep::bench
