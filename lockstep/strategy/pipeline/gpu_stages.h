// SPDX-License-Identifier: Apache-2.0
// strategy/pipeline/gpu_stages.h: the parts of a model whose stages are GPUs of one process.
//
// Each device has a part: a model of its own, in which only the tensors of its stage have memory, on its GPU; the others are
// meta tensors, as in a stage that is a process (model/partial_model.h). The whole model, which the optimizer, validation and
// checkpoints see, has no memory of its own: each of its tensors is that of the first device that has it. Where several have
// it (replicas of a stage, or stages that share a parameter) the first one adds up the gradients and is updated, and the
// others copy it.
//
// Flow:    gradients of the parts -> sum_gradients() -> .grad of the whole model -> optimizer/ -> copy_from_first() -> parts
// Owns:    the parts
// Threads: the scheduling thread of `devices`, on which nothing runs meanwhile
// Ranks:   inside one process
#pragma once

#include <vector>

#include "lockstep/base/int_vector.h"

#include "lockstep/devices.h"
#include "lockstep/strategy/pipeline/cut.h"
#include "lockstep/strategy/pipeline/stage_parameters.h"
#include "lockstep/task.h"

namespace lockstep {

class GpuStages {
 public:
  // Device i has stage i % p, for p stages. `devices` must outlive this. Throws what Task::make_model throws.
  GpuStages(const Task& task, ModulePtr whole, Devices& devices);

  // Gives the devices the tensors of their stages: at first from the host, later from where they were. No gradient is left.
  // Blocks. Throws DeviceError.
  void place(const Cut& cut);

  std::vector<Piece> pieces(int device) const { return pieces_in(parts_[device].pieces, cut_[device % cut_.size()]); }
  torch::nn::Module& part(int device) const { return *parts_[device].model; }

  void begin_step();     // parts train or evaluate as the whole model does; their gradients are cleared
  void sum_gradients();  // of a tensor that several devices have. Blocks. Throws DeviceError, PeerLost

  enum class Copied { kParameters, kBuffersToo };
  void copy_from_first(Copied what);  // likewise

  // Through all stages of the first replica. Returns the last one's output, on its GPU.
  torch::Tensor forward(const torch::Tensor& data);

 private:
  struct Part {
    ModulePtr model;
    std::vector<Piece> pieces;
    std::vector<torch::Tensor> tensors;  // in the order of StagedTensors
  };
  struct Holder {
    int device = 0;
    torch::Tensor tensor;
  };
  struct PlacedTensor {
    torch::Tensor whole;
    bool is_buffer = false;
    std::vector<Holder> holders;  // never empty
  };

  void place_tensor(PlacedTensor& tensor) const;
  void follow_mode();

  Task task_;
  ModulePtr whole_;
  Devices& devices_;
  IntVector<Part> parts_;
  Cut cut_;
  std::vector<PlacedTensor> tensors_;
  std::vector<PlacedTensor> shared_;  // those of several holders
};

}  // namespace lockstep
