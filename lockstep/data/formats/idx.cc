// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <zlib.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "lockstep/base/text.h"
#include "lockstep/base/to_size.h"
#include "lockstep/data/formats/readers.h"

namespace lockstep {
namespace {

// zlib passes a file that is not compressed through, so one reader serves both.
class IdxReader {
 public:
  // O_NONBLOCK: opening a named pipe would wait for its writer without limit; of a regular file it changes nothing.
  IdxReader(const fs::path& path, uint64_t most_bytes)
      : path_(path),
        most_(most_bytes),
        file_(gzdopen(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK), "rb"), &gzclose) {
    if (!file_)
      throw DataError({.what = concat("can't open ", path.string(), ": ", std::strerror(errno)),
                       .here = path.string(),
                       .likely = "a wrong --data-dir, or the dataset is not installed",
                       .next = "Debian has it: apt-get install dataset-fashion-mnist"});
  }

  Tensor read_tensor() {
    const std::vector<int64_t> shape = read_shape();
    const auto size = product(shape);
    if (!size || to_size(*size) > most_)
      throw DataError({.what = concat(path_.string(), " unpacks to more than the limit"),
                       .here = path_.string(),
                       .likely = "a damaged file, or one that was made to fill the memory",
                       .next = "if you trust it, raise the limit: most_bytes of read_idx()"});
    Bytes values = read_values(to_size(*size));
    return torch::from_blob(values.data(), shape, torch::kUInt8).clone();
  }

 private:
  std::vector<int64_t> read_shape() {
    constexpr int kUnsignedByte = 8;
    constexpr int kMostDimensions = 4;
    const auto [zero, also_zero, type, dimensions] = read_four_bytes();
    if (zero != 0 || also_zero != 0 || type != kUnsignedByte || dimensions == 0 || dimensions > kMostDimensions)
      throw bad(concat("no IDX file of unsigned bytes in 1 to ", kMostDimensions, " dimensions"), "another dataset");
    std::vector<int64_t> shape(dimensions);
    for (int64_t& size : shape) {
      const auto big_endian = read_four_bytes();
      for (const uint8_t byte : big_endian) size = size << 8 | byte;
    }
    return shape;
  }

  // A MiB at a time, so that memory grows with what the file really holds. The read after the last value must find the
  // end: it also makes zlib verify the checksum of a gzipped file.
  Bytes read_values(size_t count) {
    constexpr size_t kChunk = size_t{1} << 20;
    Bytes values;
    while (values.size() < count) {
      const size_t old_size = values.size();
      values.resize(std::min(count, old_size + kChunk));
      const size_t found = old_size + read(values.data() + old_size, values.size() - old_size);
      if (found < values.size())
        throw bad(concat("truncated: ", count, " values promised, ", found, " found"), "an interrupted download");
    }
    uint8_t extra = 0;
    if (read(&extra, 1) != 0) throw bad("goes on after its last value", "a wrong header");
    if (ended_early_) throw bad("truncated in its checksum", "an interrupted download");
    return values;
  }

  std::array<uint8_t, 4> read_four_bytes() {
    std::array<uint8_t, 4> bytes{};
    if (read(bytes.data(), bytes.size()) < bytes.size())
      throw bad("truncated in its header", "an interrupted download");
    return bytes;
  }

  // Reads up to `bytes` bytes; fewer only at the end of the file.
  size_t read(uint8_t* into, size_t bytes) {
    const int got = gzread(file_.get(), into, static_cast<unsigned>(bytes));
    int code = Z_OK;
    const char* message = gzerror(file_.get(), &code);
    if (got < 0 || (code != Z_OK && code != Z_STREAM_END && code != Z_BUF_ERROR)) throw bad(message, "a damaged file");
    ended_early_ = code == Z_BUF_ERROR;
    offset_ += to_size(got);
    return to_size(got);
  }

  DataError bad(const std::string& what, const std::string& likely) const {
    return DataError({.what = concat(path_.filename().string(), ": ", what),
                      .here = concat(path_.string(), ", offset ", offset_),
                      .likely = likely,
                      .next = "fetch the file again, or name another with --data-dir"});
  }

  fs::path path_;
  uint64_t most_;
  std::unique_ptr<gzFile_s, decltype(&gzclose)> file_;
  size_t offset_ = 0;         // of the uncompressed content
  bool ended_early_ = false;  // the last read reached the end inside compressed data, or inside the checksum after it
};

}  // namespace

Tensor read_idx(const fs::path& path, uint64_t most_bytes) { return IdxReader(path, most_bytes).read_tensor(); }

ImageSourcePtr read_mnist_files(const std::string& name, const fs::path& folder, Split split) {
  const auto find = [&](const std::string& file) {
    const std::string path = (folder / concat(split == Split::kTrain ? "train" : "t10k", file)).string();
    return fs::path(fs::exists(path) ? path : path + ".gz");
  };
  const auto image_file = find("-images-idx3-ubyte");
  const auto label_file = find("-labels-idx1-ubyte");
  const Tensor images = read_idx(image_file);
  if (images.dim() != 3 || images.size(0) == 0 || images.size(1) != 28 || images.size(2) != 28)
    throw DataError(
        {.what = concat(image_file.filename().string(), " holds shape ", images.sizes(), ", not (N, 28, 28)"),
         .here = concat(image_file.string(), ", offset 4"),
         .likely = "another dataset, or labels where images belong"});
  return std::make_shared<MemoryImages>(name, images, read_idx(label_file), 10, label_file.string());
}

// Mean and deviation of the training images scaled to [0, 1]; a test computes them again.
ImageTransforms FashionMNIST::normalised() { return {.mean = {0.2860F}, .deviation = {0.3530F}}; }

FashionMNIST::FashionMNIST(const fs::path& folder, Split split, const ImageTransforms& transforms)
    : ImageDataset(read_mnist_files("fashion-mnist", folder, split), transforms) {}

}  // namespace lockstep
