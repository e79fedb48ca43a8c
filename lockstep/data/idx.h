// data/idx.h: reads the IDX format of the MNIST family, plain or gzipped.
//
// The format (LeCun, Cortes and Burges, "The MNIST database"): two zero bytes, a type byte (8: unsigned byte), the
// number of dimensions, each dimension as a big-endian 32-bit number, then the values, last dimension fastest.
//
// Threads: any
// Ranks:   no communication
#pragma once

#include <torch/types.h>

#include <filesystem>

namespace lockstep {

// The whole file as a uint8 tensor of the file's shape. Memory grows with what really arrives, not with what the header
// promises. Throws DataError naming the file and the offset: not there, not IDX, another type, truncated, too long,
// damaged compression.
torch::Tensor read_idx(const std::filesystem::path& path);

}  // namespace lockstep
