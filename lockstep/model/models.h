// model/models.h: the models that `lockstep train --model` knows, each as a Task.
//
// Flow:    a name -> here -> train/builtin.h, bench/
// Threads: pure functions
#pragma once

#include <string>
#include <vector>

#include "lockstep/model/task.h"

namespace lockstep {

// lenet, mlp, alexnet, inception, resnet18, resnet34, resnet50, the same with -32 for 32x32 images and 10 classes,
// gpt2, and gpt-mini: 4 layers of width 128 over bytes, for a CPU.
std::vector<std::string> model_names();

Task model_task(const std::string& name);  // throws UsageError naming the models there are

// Predicts the next token of each position of (B, T) tokens; the loss is the mean over all B * T of them, and a sample
// counts as right by the share of its tokens that are.
struct GPTOptions;
Task gpt_task(const std::string& name, const GPTOptions& options);

}  // namespace lockstep
