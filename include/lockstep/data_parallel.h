// SPDX-License-Identifier: Apache-2.0
// lockstep/data_parallel.h: a module on several devices that is called like one module, as torch.nn.DataParallel.
//
//   forward:  the batch is split over the devices, device 0's parameters are replicated, outputs are gathered on device 0
//   backward: the gradient of the gathered outputs is scattered, and gradients are summed in device 0's .grad
//
//   lockstep::DataParallel net([] { return Net(); }, devices);
//   torch::optim::Adam optimizer(net.module().parameters());
//   auto loss = torch::mse_loss(net.forward(images), targets);   // of the whole batch
//   net.backward(loss);  optimizer.step();  optimizer.zero_grad();
//
// The strategy `data_parallel` does the same with an optimizer of lockstep's (docs/strategies/data_parallel.md).
//
// Flow:    a batch -> forward() on Devices -> the caller's loss -> backward() -> .grad of module()
// Owns:    a replica of the module per device; devices that are cores share the parameters
// Threads: call from the thread that made the Devices, which must outlive this
// Ranks:   inside one process
#pragma once

#include "lockstep/devices.h"
#include "lockstep/task.h"

namespace lockstep {

class DataParallel {
 public:
  // make_module: returns a torch::nn::ModuleHolder such as Net, with forward(Tensor); called once per device, with
  // torch's generator seeded by `seed`: not every module can be cloned in C++.
  template <class MakeModule>
  requires(!requires { typename MakeModule::ContainedType; })
      DataParallel(MakeModule make_module, Devices& devices, uint64_t seed = 0)
      : DataParallel(Task{.make_model = [make_module] { return make_module().ptr(); },
                          .forward = call_forward<typename decltype(make_module())::ContainedType>},
                     devices, seed) {}
  DataParallel(const Task& task, Devices& devices, uint64_t seed = 0);  // `task` says how to make and run it

  // Wraps a module that exists, such as a Net, and moves it to device 0; the other devices have clones of it, for which its class
  // has to be derived from torch::nn::Cloneable, as torch's own are. Seeds torch's generator with 0. Throws c10::Error: it has no
  // clone().
  template <class Holder>
  requires requires { typename Holder::ContainedType; }
  DataParallel(const Holder& module, Devices& devices)
      : DataParallel(Task{.make_model = [module, is_first = true]() mutable -> ModulePtr {
                            return std::exchange(is_first, false) ? module.ptr() : module->clone();
                          },
                          .forward = call_forward<typename Holder::ContainedType>},
                     devices) {}
  ~DataParallel();
  DataParallel& operator=(DataParallel&&) = delete;

  // Device 0's module: its parameters are those that count, for an optimizer of any kind, checkpoints, train() and
  // eval().
  torch::nn::Module& module() const;

  // The outputs for a whole batch, (B, ...), on device 0. data: (B, ...), on any device, B > 0; its own gradient is not
  // computed. Blocks. Throws UsageError: no samples; and what Devices::run() throws.
  Tensor forward(const Tensor& data) { return forward(Batch{data}); }
  Tensor forward(const Batch& batch);

  // Adds the gradients of everything that forward() has returned since the last backward() to .grad of device 0's
  // parameters. loss: a scalar made from these outputs. Blocks. Throws what backward() and Devices::run() throw. A
  // plain loss.backward() throws UsageError: it would end at the outputs.
  void backward(const Tensor& loss);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace lockstep
