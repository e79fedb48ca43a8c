// data/synthetic.h: images out of a random generator: of any size, always the same, and to be learnt. For tests and
// benchmarks.
#pragma once

#include <memory>

#include "lockstep/data/image_source.h"

namespace lockstep {

struct SyntheticOptions {
  std::int64_t samples = 1024;
  ImageShape shape{3, 32, 32};
  std::int64_t classes = 10;
  std::uint64_t seed = 0;  // of the samples; the classes' patterns are the same for every seed
};

// Sample i is of class i modulo `classes`: the class's pattern, half covered by noise. Lies in memory as bytes.
// Throws UsageError: a number below 1.
std::shared_ptr<const ImageSource> synthetic_images(const SyntheticOptions& options);

}  // namespace lockstep
