// SPDX-License-Identifier: Apache-2.0
// train/predictions.h: the file that `predict` writes: as NumPy's .npy the model's outputs; as .csv a line per sample.
//
// Owns:    the file, which is there, whole, after finish()
// Threads: one thread
// Ranks:   rank 0 has one
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/base/files/file.h"

namespace lockstep {

class PredictionFile {
 public:
  // classes: the number of the model's classes, and their names, if they have any; 0: its outputs are numbers. Throws SystemError.
  PredictionFile(const std::string& path, std::int64_t samples, std::int64_t classes, std::vector<std::string> names);

  // The outputs (B, ...) of the next samples, on the CPU. Throws UsageError: outputs that a table can't have; SystemError.
  void add(const torch::Tensor& outputs);
  void finish();

 private:
  void add_array(const torch::Tensor& outputs);
  void add_lines(const torch::Tensor& outputs);

  AtomicFile file_;
  bool is_array_;
  std::int64_t samples_;
  std::int64_t classes_;
  std::vector<std::string> names_;
  std::int64_t written_ = 0;
};

}  // namespace lockstep
