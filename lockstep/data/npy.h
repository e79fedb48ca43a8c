// data/npy.h: reads NumPy's .npy files, and .npz archives of them.
//
// The format (NEP 1, "A simple file format for NumPy arrays"): "\x93NUMPY", version 1.0 to 3.0, the length of a header, the
// header as a Python dictionary (descr, fortran_order, shape), then the values. Nothing of it is executed: Python objects
// and structures are refused.
//
// Threads: any
#pragma once

#include <torch/types.h>

#include <filesystem>
#include <map>
#include <span>
#include <string>

namespace lockstep {

// A tensor of the file's shape and dtype, contiguous. Throws DataError naming the file: not there, not .npy, a dtype that
// torch does not have, truncated, too long.
torch::Tensor read_npy(const std::filesystem::path& path);
torch::Tensor parse_npy(std::span<const std::uint8_t> bytes, const std::string& origin);

// Every array of the archive under its name. Memory grows with what really arrives. Throws DataError: not a zip archive, a
// damaged entry, an entry that read_npy would refuse.
std::map<std::string, torch::Tensor> read_npz(const std::filesystem::path& path);

}  // namespace lockstep
