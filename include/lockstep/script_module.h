// SPDX-License-Identifier: Apache-2.0
// lockstep/script_module.h: a model in TorchScript, such as torch.jit.save() writes, as a torch::nn::Module, so that
// optimizers, DistributedDataParallel, tasks and checkpoints take it. Included by itself.
//
//   lockstep::ScriptModule net("net.pt");
//   lockstep::SGD optimizer(net->parameters(), {.lr = 0.1});
//   lockstep::DistributedDataParallel ddp(world, *net, optimizer);
//
// PyTorch has deprecated TorchScript; torch 2.15 still has it.
//
// Flow:    a file -> torch::jit::Module -> here -> lockstep
// Owns:    the module; its parameters and buffers are those of the torch::nn::Module, by the same names
// Threads: one thread
// Ranks:   no communication
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>
#include <torch/script.h>

#include <utility>

#include "lockstep/error.h"

namespace lockstep {

class ScriptModuleImpl : public torch::nn::Module {
 public:
  // Throws what torch::jit::load() throws.
  explicit ScriptModuleImpl(const std::string& file) : ScriptModuleImpl(torch::jit::load(file)) {}

  explicit ScriptModuleImpl(torch::jit::Module script) : script_(std::move(script)) {
    torch::nn::Module::train(script_.is_training());
    for (const auto& each : script_.named_parameters(/*recurse=*/false))
      register_parameter(each.name, each.value, each.value.requires_grad());
    for (const auto& each : script_.named_buffers(/*recurse=*/false)) register_buffer(each.name, each.value);
    for (const auto& each : script_.named_children())
      register_module(each.name, std::make_shared<ScriptModuleImpl>(each.value));
  }

  // The script's forward. Inputs: on the device of the parameters. Throws UsageError: the script replaces one
  // of its buffers.
  template <class... Inputs>
  torch::Tensor forward(const Inputs&... inputs) {
    const torch::Tensor output = script_.forward({inputs...}).toTensor();
    const auto known = named_buffers();
    for (const auto& each : script_.named_buffers())
      if (!known[each.name].is_same(each.value))
        throw UsageError({.what = "the script's forward has replaced its buffer " + each.name,
                          .likely = "self.name = ... in the script",
                          .next = "write into it there: self.name.copy_(...)"});
    return output;
  }

  void train(bool on = true) override {
    torch::nn::Module::train(on);
    script_.train(on);
  }

 private:
  torch::jit::Module script_;
};
TORCH_MODULE(ScriptModule);

}  // namespace lockstep
