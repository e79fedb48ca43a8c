// SPDX-License-Identifier: Apache-2.0
// model/samples.h: a few elements of a tensor, which show an operation over all of it however it was written: through
// data(), numpy, a raw pointer or a collective of another library, none of which torch's version counter sees.
//
// Threads: any
// Ranks:   no communication
#pragma once

#include <torch/types.h>

#include <cstdint>

namespace lockstep {

// Hashes 16 elements, spread evenly; where one is zero it looks for another one that is not, at up to 4,096 places of the
// tensor. Continues from `seed`. Returns `seed` for a tensor that is undefined, empty, sparse, not dense in memory or on a
// GPU, where reading elements would wait.
uint64_t hash_of_samples(const torch::Tensor& tensor, uint64_t seed = 0);

}  // namespace lockstep
