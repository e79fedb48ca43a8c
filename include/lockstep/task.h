// SPDX-License-Identifier: Apache-2.0
// lockstep/task.h: what lockstep has to know about a program to train it: how to make its model, run it and judge it.
//
// Flow:    the user's program -> lockstep::run(), lockstep train -> a strategy
// Owns:    nothing: a Task holds functions; a Piece is valid as long as the model that it was made from
// Threads: a strategy may call a Task's functions from several threads, each with a model of its own; a Piece is used
//          by one thread at a time, different pieces at the same time
// Ranks:   every rank gets the same Task; no communication
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/modules/container/sequential.h>

#include "lockstep/dataset.h"
#include "lockstep/metric.h"

namespace lockstep {

using ModulePtr = std::shared_ptr<torch::nn::Module>;

// A part of a model that a pipeline never cuts: a layer or a block. A model is a list of pieces, and a stage of a
// pipeline is a range of them. Running all pieces one after another gives what the model's own forward gives; what one
// returns is what the next one takes: usually one tensor, several where a skip connection or a mask crosses the cut.
struct Piece {
  std::string name;
  std::vector<torch::nn::Module*> modules;  // whose parameters and buffers it uses; a tied one is in several pieces
  std::function<Tensors(const Tensors&)> forward;
};

// A piece of one tensor in and one tensor out.
Piece make_piece(std::string name, std::vector<torch::nn::Module*> modules,
                 std::function<Tensor(const Tensor&)> forward);

// A piece of one tensor in and one out for tensor `index` of several; the others are passed on as they are. So branches that
// run beside each other and meet again become a list of pieces: docs/strategies/pipeline.md shows a Siamese network.
Piece on_tensor(size_t index, Piece piece);

// A piece for each module that the Sequential holds; each has to take one tensor and return one.
std::vector<Piece> pieces_of(torch::nn::SequentialImpl& model);

// The input of the first piece: the data, then Batch::more in the order of the names.
Tensors inputs_of(const Batch& batch);

// Runs them through all pieces; returns the first tensor of the last one's output.
Tensor run_pieces(const std::vector<Piece>& pieces, const Batch& batch);
inline Tensor run_pieces(const std::vector<Piece>& pieces, const Tensor& data) {
  return run_pieces(pieces, Batch{data});
}

// The trained parameters of the pieces' modules, each once.
Tensors parameters_of(const std::vector<Piece>& pieces);

// The samples that the model takes, for data that is made to fit it.
struct SampleShape {
  std::vector<int64_t> sizes;  // of one sample, such as {3, 224, 224}; empty: not known
  int64_t classes = 0;         // targets are in [0, classes); 0: they are numbers, or it is not known
  int64_t numbers = 0;         // how many numbers a target has, where it is not a class
  bool tokens = false;         // int64 tokens in, and a target for each of them
  bool operator==(const SampleShape&) const = default;
};

// ---- What a program can be told while it trains

struct Evaluation;  // lockstep/evaluate.h

struct StepEvent {
  int64_t step = 0;  // since the start of the run, from 0
  int64_t epoch = 0;
  double loss = 0;  // mean over the samples of all ranks; 0 where Task::samples counts nothing
  double learning_rate = 0;
  int64_t samples = 0;  // of all ranks
  double seconds = 0;
};

struct EpochEvent {
  int64_t epoch = 0;
  int64_t step = 0;  // its last; the learning rate is that of this step
  double loss = 0;   // mean over its samples, as each step found it; NaN where none counts
  double learning_rate = 0;
  int64_t samples = 0;
  double seconds = 0;            // without validation
  const Evaluation& validation;  // NaN: there is no validation set, or an asynchronous rank 0 validates for this one
};

struct CheckpointEvent {
  int64_t step = 0;  // with which --resume goes on from it
  std::string path;  // on rank 0's machine; of several files the index. It is kept until two newer ones are there
};

struct Task {
  // A fresh model on the CPU. Called with torch's generator seeded, once per replica: modules can't be cloned in C++.
  std::function<ModulePtr()> make_model;
  // model and (B, ...) data on its device, or the batch -> the model's output
  BatchFunction<torch::nn::Module&, &Batch::data> forward;
  // output and (B, ...) target on its device, or the batch, whose data may be elsewhere -> the mean loss over the B samples, a scalar
  OutputFunction loss;
  // Counts what the loss is the mean over where that is not the B samples, such as tokens or boxes that are not masked.
  // The counts of a batch's parts add up to its own. A part that counts 0 is left out, whatever its loss would be. Where
  // the batch is on a GPU, a count from its tensors waits for them. Not with SyncBatchNorm on several ranks. Empty: B.
  std::function<int64_t(const Batch& batch)> samples = nullptr;
  // Counts the samples that the output has right, a scalar, in what `samples` counts; empty: no accuracy is reported.
  OutputFunction correct = nullptr;
  std::vector<Metric> metrics = {};  // more figures of a dataset
  // The data to train on, from --data-dir; empty: --data chooses one of lockstep's.
  std::function<Datasets(const std::string& data_dir)> make_data = nullptr;
  std::string name = "task";  // for tables and metrics
  SampleShape sample = {};
  // The model as pieces, as small as it allows, from which a pipeline's stages are made. Empty: a model that is a
  // torch::nn::Sequential, whose forward takes the data alone, is cut between its modules; another one can't be cut.
  std::function<std::vector<Piece>(torch::nn::Module& model)> stages = nullptr;
  // The same task for other samples, such as images of another size. Throws UsageError: the model can't take them. Empty: the
  // model takes those of `sample` alone.
  std::function<Task(const SampleShape& sample)> fit = nullptr;

  // The training loop calls the next three on every rank, on its own thread, between two steps. Training waits until they
  // return: others wait for this rank, --timeout at most. What they throw ends the run as any other error does. A run that goes on
  // from a checkpoint reports again what it repeats; after the loss of a rank a step may be left out. model: this rank's, not to
  // be changed.
  std::function<void(const StepEvent& event, torch::nn::Module& model)> on_step = nullptr;
  std::function<void(const EpochEvent& event, torch::nn::Module& model)> on_epoch = nullptr;
  // Called when the checkpoint is on the disk, some steps later: until then all ranks ask rank 0 after each step. Where each rank
  // goes at its own pace (asynchronous servers), on rank 0 alone.
  std::function<void(const CheckpointEvent& event)> on_checkpoint = nullptr;
};

// The loss of classification tasks: the mean cross entropy.
struct CrossEntropy {
  double label_smoothing = 0;  // the share of each target spread over all classes (Szegedy et al., 2016)
  bool classes_last = false;   // the output is (B, ..., classes), not (B, classes, ...)

  Tensor operator()(const Tensor& output, const Tensor& target) const {
    return classes_last ? of(output.flatten(0, -2), target.flatten()) : of(output, target);
  }

 private:
  Tensor of(const Tensor& output, const Tensor& target) const {
    return torch::cross_entropy_loss(output, target, {}, at::Reduction::Mean, -100, label_smoothing);
  }
};

// Task::forward of models of this type.
template <class Model>
Tensor call_forward(torch::nn::Module& model, const Tensor& data) {
  return dynamic_cast<Model&>(model).forward(data);
}

// A Task out of a module type `M` (a torch::nn::ModuleHolder such as LeNet) that has forward(Tensor), with cross
// entropy; `options`: what M is constructed from. If M has pieces(), so has the task.
template <class M, class... Options>
Task classification_task(std::string name, Options... options) {
  Task task{.make_model = [options...] { return M(options...).ptr(); },
            .forward = call_forward<typename M::Impl>,
            .loss = CrossEntropy(),
            .correct = [](const Tensor& output, const Tensor& target) { return output.argmax(1).eq(target).sum(); },
            .name = std::move(name)};
  if constexpr (requires(typename M::Impl & model) { model.pieces(); })
    task.stages = [](torch::nn::Module& model) { return dynamic_cast<typename M::Impl&>(model).pieces(); };
  return task;
}

}  // namespace lockstep
