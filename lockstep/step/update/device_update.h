// SPDX-License-Identifier: Apache-2.0
// step/update/device_update.h: updates parameters that are on GPUs with libtorch's kernels for whole lists of tensors.
//
// Flow:    .grad, or step/gradient_slices.h + UpdateRule -> here -> parameters, optimizer state
// Owns:    nothing; the optimizer state is on the parameters' devices
// Threads: one thread, whose current streams the work is put on; with several GPUs a thread for each
// Ranks:   no communication; with slices all ranks make the same calls, and those that need a norm or whole state send
#pragma once

#include <ATen/ops/_foreach_clamp_max.h>
#include <ATen/ops/_foreach_clamp_min.h>
#include <ATen/ops/_foreach_lerp.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_norm.h>
#include <torch/types.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "lockstep/base/to_size.h"
#include "lockstep/model/parameters.h"
#include "lockstep/optimizer.h"
#include "lockstep/step/gradient_slices.h"
#include "lockstep/step/local_gradients.h"
#include "lockstep/step/update/optimizer_state.h"

namespace lockstep {

class DeviceUpdate {
 public:
  // Allocates the state of its parameters, which are dense and on GPUs; it must outlive this. slices: where this rank updates
  // a part of them, all of which are the state's, by a rule that is not layerwise; null: all of them. on_each_gpu: of
  // parameters on several GPUs.
  explicit DeviceUpdate(OptimizerState& state, std::shared_ptr<GradientSlices> slices = nullptr,
                        OnEachGpu on_each_gpu = {})
      : state_(state), slices_(std::move(slices)), on_each_gpu_(std::move(on_each_gpu)) {
    Tensors parts;
    for (size_t i = 0; i < state.parameters.size(); ++i)
      if (!slices_) parameter_of_.push_back(i), parts.push_back(state.parameters[i].detach());
    if (slices_)
      for (const auto& part : slices_->parts()) {
        const auto is_it = [&](const torch::Tensor& each) { return each.is_same(part.parameter); };
        parameter_of_.push_back(to_size(std::ranges::find_if(state.parameters, is_it) - state.parameters.begin()));
        parts.push_back(part.values);
      }
    state.make_lists([&](Wanted wanted) {
      Tensors arrays(parts.size());
      for (size_t i = 0; i < arrays.size(); ++i)
        if (wanted(parts[i])) arrays[i] = torch::zeros_like(parts[i], parts[i].options().dtype(state_dtype(parts[i])));
      return arrays;
    });
  }

  // Updates every parameter that has a .grad, which stays as it is; or its slice. Waits for the GPU only with clipping by norm or
  // loss scaling, for one number. Returns false if the step was skipped.
  // Clips as torch::nn::utils::clip_grad_norm_ and clip_grad_value_, of gradients without the loss scale. The norm is that of all
  // GPUs: it is there when all have found what they update.
  bool run(const UpdateRule& rule, const std::vector<UpdateRule::Group>& groups, const ClippingOptions& clipping,
           const std::optional<double>& loss_scale) {
    const auto all = std::make_shared<UpdatedOnGpus>();
    for (const torch::Tensor& parameter : state_.parameters)
      if (std::ranges::find(*all, parameter.device(), &Updated::device) == all->end())
        all->push_back({.device = parameter.device()});
    const bool needs_norm = loss_scale || clipping.max_norm > 0;
    on_each(all, [this, needs_norm](Updated& updated) {
      find_updated(updated);
      if (needs_norm) measure(updated);
    });
    const bool any = std::ranges::any_of(*all, [](const Updated& updated) { return !updated.gradients.empty(); });
    double factor = 1 / loss_scale.value_or(1);
    if (needs_norm && (any || slices_)) {
      gradient_norm_ = norm_of(*all) * factor;
      if (loss_scale && !std::isfinite(gradient_norm_)) return false;
      factor *= clip_factor(clipping, gradient_norm_);
    }
    for (size_t i = 0; i < state_.parameters.size(); ++i) state_.steps[i] += is_updated(state_.parameters[i]) ? 1 : 0;
    on_each(all, [this, &rule, &groups, factor, max_value = clipping.max_value](Updated& updated) {
      clip(updated, factor, max_value);
      apply(rule, groups, updated);
    });
    return true;
  }

  double gradient_norm() const { return gradient_norm_; }

  // Returns what `of`, one of the state's lists, has beside parameter i. With slices it is a copy, put together from those of all
  // ranks: all call. Throws PeerLost.
  torch::Tensor beside(const Tensors& of, size_t i) const {
    const torch::Tensor& parameter = state_.parameters[i];
    return slices_ ? slices_->gather(parameter, of, state_dtype(parameter)) : of[i];
  }

  // Sets it; undefined: to zeros. Sends nothing.
  void set_beside(const Tensors& of, size_t i, const torch::Tensor& value) const {
    const torch::Tensor parameter = state_.parameters[i].detach();
    const torch::Tensor whole = torch::zeros_like(parameter, parameter.options().dtype(state_dtype(parameter)));
    if (value.defined()) whole.copy_(value);
    for (size_t part = 0; part < parameter_of_.size(); ++part)
      if (parameter_of_[part] == i)
        dense_view(of[part]).copy_(
            dense_view(whole).narrow(0, slices_ ? slices_->parts()[part].begin : 0, of[part].numel()));
  }

 private:
  // Parameters, or parts of them, that this step updates on one GPU.
  struct Updated {
    torch::Device device;
    std::vector<size_t> part = {};  // in the lists of OptimizerState
    Tensors stored = {};            // what the model computes with
    Tensors values = {};            // that, or the float32 master of 16 bits
    Tensors gradients = {};         // of their dtype and memory order
    Tensors norms = {};             // with slices of each gradient, else of all together
  };

  using UpdatedOnGpus = std::vector<Updated>;  // in the order in which the parameters name the GPUs

  bool is_updated(const torch::Tensor& parameter) const {
    return slices_ ? slices_->is_used(parameter) : parameter.grad().defined();
  }

  // Calls work() for each GPU; `all` lives as long as a thread uses it.
  void on_each(const std::shared_ptr<UpdatedOnGpus>& all, const std::function<void(Updated&)>& work) const {
    if (!on_each_gpu_)
      for (Updated& updated : *all) work(updated);
    else
      on_each_gpu_([all, work](torch::Device device) {
        const torch::NoGradGuard no_grad;
        const auto found = std::ranges::find(*all, device, &Updated::device);
        if (found != all->end()) work(*found);
      });
  }

  // Masters follow 16-bit parameters as in follow_stored() of flat_update.cc.
  void find_updated(Updated& updated) const {
    for (size_t part = 0; part < parameter_of_.size(); ++part) {
      const torch::Tensor& parameter = state_.parameters[parameter_of_[part]];
      if (parameter.device() != updated.device || !is_updated(parameter)) continue;
      const torch::Tensor stored = slices_ ? slices_->parts()[part].values : parameter.detach();
      const torch::Tensor gradient = slices_ ? slices_->parts()[part].gradient : gradient_like(parameter);
      updated.part.push_back(part);
      updated.stored.push_back(stored);
      const bool has_master = is_16_bit(stored);
      if (has_master) {
        const torch::Tensor& master = state_.masters[part];
        master.copy_(torch::where(master.to(stored.scalar_type()).eq(stored), master, stored.to(torch::kFloat32)));
      }
      updated.values.push_back(has_master ? state_.masters[part] : stored);
      updated.gradients.push_back(has_master ? gradient.to(torch::kFloat32) : gradient);
    }
  }

  void measure(Updated& updated) const {
    if (updated.gradients.empty()) return;
    updated.norms = at::_foreach_norm(updated.gradients, 2, torch::kFloat64);
    if (!slices_) updated.norms = {torch::stack(updated.norms).norm()};
  }

  double norm_of(const UpdatedOnGpus& all) const {
    if (slices_) {
      Tensors of_parts;
      if (!parameter_of_.empty()) of_parts.assign(parameter_of_.size(), slices_->zero());
      for (const Updated& updated : all)
        for (size_t u = 0; u < updated.norms.size(); ++u) of_parts[updated.part[u]] = updated.norms[u];
      return slices_->norm(of_parts);
    }
    double norm = 0;
    for (const Updated& updated : all)
      for (const torch::Tensor& each : updated.norms) {
        const double of_device = each.item<double>();
        norm = std::sqrt(norm * norm + of_device * of_device);  // std::hypot wants glibc 2.35
      }
    return norm;
  }

  static void clip(Updated& updated, double factor, double max_value) {
    auto& gradients = updated.gradients;
    if (gradients.empty()) return;
    if (factor != 1) gradients = at::_foreach_mul(gradients, factor);
    if (max_value > 0) gradients = at::_foreach_clamp_min(at::_foreach_clamp_max(gradients, max_value), -max_value);
  }

  void apply(const UpdateRule& rule, const std::vector<UpdateRule::Group>& groups, const Updated& updated) const {
    for (size_t group = 0; group < groups.size(); ++group) {
      WholeTensors tensors;
      tensors.state.resize(state_.arrays.size());
      for (size_t u = 0; u < updated.part.size(); ++u) {
        const size_t i = parameter_of_[updated.part[u]];
        if (state_.group_of[i] != group) continue;
        tensors.parameters.push_back(updated.values[u]);
        tensors.gradients.push_back(updated.gradients[u]);
        for (size_t s = 0; s < tensors.state.size(); ++s) tensors.state[s].push_back(state_.arrays[s][updated.part[u]]);
        tensors.steps.push_back(state_.steps[i]);
      }
      if (!tensors.parameters.empty()) rule.update_on_device(groups[group], tensors);
    }
    if (!state_.averages.empty()) average(updated);
    for (size_t u = 0; u < updated.part.size(); ++u)
      if (is_16_bit(updated.stored[u])) updated.stored[u].copy_(updated.values[u]);
  }

  void average(const Updated& updated) const {
    Tensors averages, values;
    for (size_t u = 0; u < updated.part.size(); ++u) {
      const size_t part = updated.part[u];
      if (state_.steps[parameter_of_[part]] == 1) {
        state_.averages[part].copy_(updated.values[u]);
      } else {
        averages.push_back(state_.averages[part]);
        values.push_back(updated.values[u]);
      }
    }
    if (!averages.empty()) at::_foreach_lerp_(averages, values, 1 - state_.ema_decay);
  }

  OptimizerState& state_;
  std::shared_ptr<GradientSlices> slices_;
  OnEachGpu on_each_gpu_;
  std::vector<size_t> parameter_of_;  // of each part: its index in OptimizerState::parameters
  double gradient_norm_ = 0;
};

}  // namespace lockstep
