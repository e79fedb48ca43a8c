// SPDX-License-Identifier: Apache-2.0
// bench/data/measure.h: the measurements of `lockstep bench data`, each of lockstep alone.
//
// Threads: one; what is measured starts its own
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <vector>

#include "lockstep/dataset.h"

namespace lockstep::bench {

// Samples per second of one epoch after another, the first left out; batches of 256, shuffled.
std::vector<double> epoch_rates(const std::shared_ptr<const Dataset>& dataset, int workers, int epochs,
                                std::int64_t batch_size = 256);

// Resident memory in bytes after each of `epochs` epochs.
std::vector<double> memory_after_epochs(const std::shared_ptr<const Dataset>& dataset, int workers, int epochs);

// FOLDER/CLASS/N.jpg: synthetic photographs of 500 x 375 pixels.
void write_photographs(const std::filesystem::path& folder, int count);

// FOLDER: packed records of 112 KiB, `bytes` in all.
void write_records(const std::filesystem::path& folder, std::uint64_t bytes);

// Bytes per second of one thread. With `cold`, the files are dropped from the page cache first.
double record_rate(const std::filesystem::path& folder, bool cold, std::uint64_t seed);  // shuffled, with checksums
double file_rate(const std::filesystem::path& folder, bool cold);                        // pread of the same files

struct StepSeconds {
  double loaded;    // a step with its batch out of the loader
  double repeated;  // the same step on one batch in memory
};
// LeNet on Fashion-MNIST, a rank of one thread per core; medians over blocks of steps, in turn.
StepSeconds lenet_step(int ranks, int blocks);

}  // namespace lockstep::bench
