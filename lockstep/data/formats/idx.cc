// SPDX-License-Identifier: Apache-2.0
#include "lockstep/datasets.h"

#include <fcntl.h>
#include <zlib.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <memory>
#include <vector>

#include "lockstep/base/text.h"
#include "lockstep/base/to_size.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

constexpr std::size_t kChunk = std::size_t{1} << 20;
constexpr int kUnsignedByte = 8;
constexpr int kMaxDimensions = 4;

struct GzClose {
  void operator()(gzFile file) const { gzclose(file); }
};

// zlib passes a file that is not compressed through, so one reader serves both.
class IdxReader {
 public:
  // O_NONBLOCK: opening a named pipe would wait for its writer without limit; of a regular file it changes nothing.
  explicit IdxReader(const std::filesystem::path& path)
      : path_(path), file_(gzdopen(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK), "rb")) {
    if (!file_)
      throw DataError({.what = concat("can't open ", path.string(), ": ", std::strerror(errno)),
                       .here = path.string(),
                       .likely = "a wrong --data-dir, or the dataset is not installed",
                       .next = "Debian has it: apt-get install dataset-fashion-mnist"});
  }

  // Up to `bytes` bytes; fewer only at the end of the file.
  std::size_t read(std::uint8_t* into, std::size_t bytes) {
    const int got = gzread(file_.get(), into, static_cast<unsigned>(bytes));
    int code = Z_OK;
    const char* message = gzerror(file_.get(), &code);
    if (got < 0 || (code != Z_OK && code != Z_STREAM_END && code != Z_BUF_ERROR)) throw bad(message, "a damaged file");
    ended_early_ = code == Z_BUF_ERROR;
    offset_ += to_size(got);
    return to_size(got);
  }

  // The last read reached the end of the file inside compressed data, or inside the checksum after it.
  bool ended_early() const { return ended_early_; }

  DataError bad(const std::string& what, const std::string& likely) const {
    return DataError({.what = concat(path_.filename().string(), ": ", what),
                      .here = concat(path_.string(), ", offset ", offset_),
                      .likely = likely,
                      .next = "fetch the file again, or name another with --data-dir"});
  }

 private:
  std::filesystem::path path_;
  std::unique_ptr<gzFile_s, GzClose> file_;
  std::size_t offset_ = 0;  // of the uncompressed content
  bool ended_early_ = false;
};

void read_exactly(IdxReader& reader, std::uint8_t* into, std::size_t bytes, const char* part) {
  const std::size_t got = reader.read(into, bytes);
  if (got < bytes) throw reader.bad(concat("truncated in its ", part), "an interrupted download");
}

int read_dimension_count(IdxReader& reader) {
  std::array<std::uint8_t, 4> magic{};
  read_exactly(reader, magic.data(), magic.size(), "magic number");
  if (magic[0] != 0 || magic[1] != 0) throw reader.bad("wrong magic number, not an IDX file", "another kind of file");
  if (magic[2] != kUnsignedByte)
    throw reader.bad(concat("holds type ", int{magic[2]}, ", only unsigned bytes (8) are read"), "another dataset");
  if (magic[3] == 0 || magic[3] > kMaxDimensions)
    throw reader.bad(concat("has ", int{magic[3]}, " dimensions, 1 to ", kMaxDimensions, " are read"),
                     "a damaged file");
  return magic[3];
}

std::vector<std::int64_t> read_shape(IdxReader& reader) {
  std::vector<std::int64_t> shape;
  for (int remaining = read_dimension_count(reader); remaining > 0; --remaining) {
    std::array<std::uint8_t, 4> size{};
    read_exactly(reader, size.data(), size.size(), "header");
    shape.push_back((std::int64_t{size[0]} << 24) | (size[1] << 16) | (size[2] << 8) | size[3]);
  }
  return shape;
}

std::int64_t count_values(const IdxReader& reader, const std::vector<std::int64_t>& shape) {
  std::int64_t count = 1;
  for (const std::int64_t size : shape)
    if (__builtin_mul_overflow(count, size, &count))
      throw reader.bad("its header promises more values than 64 bits can count", "a damaged file");
  return count;
}

// A MiB at a time, so that memory grows with what the file really holds. The read after the last value must find the
// end: it also makes zlib verify the checksum of a gzipped file.
std::vector<std::uint8_t> read_values(IdxReader& reader, std::size_t count) {
  std::vector<std::uint8_t> values;
  while (values.size() < count) {
    const std::size_t old_size = values.size();
    values.resize(std::min(count, old_size + kChunk));
    const std::size_t wanted = values.size() - old_size;
    const std::size_t got = reader.read(values.data() + old_size, wanted);
    if (got < wanted)
      throw reader.bad(concat("truncated: ", count, " values promised, ", old_size + got, " found"),
                       "an interrupted download");
  }
  std::uint8_t extra = 0;
  if (reader.read(&extra, 1) != 0) throw reader.bad("goes on after its last value", "a wrong header");
  if (reader.ended_early()) throw reader.bad("truncated in its checksum", "an interrupted download");
  return values;
}

}  // namespace

torch::Tensor read_idx(const std::filesystem::path& path) {
  IdxReader reader(path);
  const std::vector<std::int64_t> shape = read_shape(reader);
  const auto values = read_values(reader, to_size(count_values(reader, shape)));
  torch::Tensor tensor = torch::empty(shape, torch::kUInt8);
  std::copy(values.begin(), values.end(), tensor.data_ptr<std::uint8_t>());
  return tensor;
}

}  // namespace lockstep
