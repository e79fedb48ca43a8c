// The slow part of every file that uses torch, compiled once. Torch's headers only: nothing of lockstep's.
#pragma once

#include <torch/csrc/autograd/variable.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/optimizer.h>
#include <torch/types.h>
