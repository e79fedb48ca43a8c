// SPDX-License-Identifier: Apache-2.0
// data/packed/packed_records.h: writes and reads records in shards: files with an index and a checksum per record, for
// data larger than memory. docs/data.md describes the format byte by byte.
//
//   FOLDER/packed.json   name, classes, shards; written last: a folder without it is not finished
//   FOLDER/00000.lsr     "LSTEPREC", version | record | record | ... | index | offset of the index, its checksum, "LSTEPEND"
//
// Flow:    a dataset -> RecordWriter -> files -> RecordReader -> lockstep/datasets.h
// Threads: RecordReader is const after construction; RecordWriter belongs to one thread
// Ranks:   no communication; one process writes a folder
#pragma once

#include <torch/types.h>

#include <array>
#include <cstring>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "lockstep/base/files/file.h"
#include "lockstep/data/formats/data_file.h"
#include "lockstep/datasets.h"

namespace lockstep {

// The format that writer and reader agree on; docs/data.md shows it as a table. The structs lie in the files as they are in
// memory: little-endian, like every machine that libtorch runs on.
namespace packed {

using Mark = std::array<char, 8>;
constexpr std::uint64_t kAlignment = 8;  // of records

struct ShardHeader {
  Mark mark{'L', 'S', 'T', 'E', 'P', 'R', 'E', 'C'};
  std::uint64_t version = 1;
  bool operator==(const ShardHeader&) const = default;
};

struct Entry {  // of the index: a record
  std::uint64_t offset;
  std::uint64_t bytes;
  std::uint64_t checksum;
};

struct Trailer {
  static constexpr Mark kMark{'L', 'S', 'T', 'E', 'P', 'E', 'N', 'D'};
  std::uint64_t index_offset;
  std::uint64_t records;
  std::uint64_t checksum;  // of the index
  Mark mark = kMark;
};

struct RecordHeader {  // the sizes of the dimensions follow, 8 bytes each, then the payload
  std::int64_t target;
  std::uint8_t encoded;
  std::uint8_t dtype;  // its place in kDtypes
  std::uint8_t dimensions;
  std::array<std::uint8_t, 5> zeros{};
};
static_assert(sizeof(ShardHeader) == 16 && sizeof(Entry) == 24 && sizeof(Trailer) == 32 && sizeof(RecordHeader) == 16);

constexpr std::size_t kMostDimensions = 8;
inline constexpr std::array kDtypes = {torch::kUInt8,    torch::kInt8,    torch::kInt16,
                                       torch::kInt32,    torch::kInt64,   torch::kFloat16,
                                       torch::kBFloat16, torch::kFloat32, torch::kFloat64};

constexpr const char* kInfoFile = "packed.json";
constexpr const char* kFormatName = "lockstep packed records";

template <class T>
T read_at(const std::uint8_t* bytes) {
  T value;
  std::memcpy(&value, bytes, sizeof value);
  return value;
}

}  // namespace packed

// A sample as it is stored.
struct Record {
  std::int64_t target = 0;
  bool encoded = false;                     // the payload is a JPEG or PNG file, and has no shape
  torch::ScalarType dtype = torch::kUInt8;  // of an array
  std::vector<std::int64_t> shape{};        // of an array
  std::span<const std::uint8_t> payload{};  // valid until the memory that it was read into changes

  bool is_image() const { return encoded || (dtype == torch::kUInt8 && shape.size() == 3); }
};

struct PackedInfo {
  std::string name;
  std::int64_t classes = 0;  // 0: the target is no class
  std::vector<std::string> class_names{};
};

class RecordWriter {
 public:
  // Makes the folder if it is missing. A shard is closed once it has `shard_bytes`. Throws SystemError; UsageError:
  // the folder holds packed data already.
  RecordWriter(std::filesystem::path folder, std::uint64_t shard_bytes = std::uint64_t{256} << 20);
  void add(const Record& record);       // throws SystemError: a full disk
  void finish(const PackedInfo& info);  // blocks until all is on the disk; without it readers refuse the folder

 private:
  struct Shard {
    std::uint64_t records;
    std::uint64_t bytes;
  };
  void write_whole_megabytes();
  void close_shard();

  std::filesystem::path folder_;
  std::uint64_t shard_bytes_;
  std::optional<AtomicFile> file_;
  std::uint64_t written_ = 0;          // bytes of this shard that are in the file
  std::vector<std::uint8_t> pending_;  // bytes that are not written yet
  std::vector<packed::Entry> index_;
  std::vector<Shard> shards_;
};

class RecordReader {
 public:
  // Checks every header and index. Throws DataError naming the file: not packed data, unfinished, a shard that is
  // missing, cut or damaged.
  explicit RecordReader(std::filesystem::path folder);

  const std::filesystem::path& folder() const { return folder_; }
  const PackedInfo& info() const { return info_; }
  std::int64_t size() const { return begins_.back(); }
  std::uint64_t bytes() const;  // of all shards
  std::vector<std::int64_t> shard_sizes() const;

  // Reads it into `scratch`. Throws DataError naming shard and record: its bytes do not match its checksum.
  Record read(std::int64_t index, std::vector<std::uint8_t>& scratch) const;
  void will_read(std::span<const std::int64_t> indices) const;  // starts reading them from the disk
  std::string origin(std::int64_t index) const;

 private:
  struct Shard {
    DataFile file;
    packed::Trailer trailer;
  };
  struct Location {
    const Shard& shard;
    std::int64_t index;  // in the shard
    packed::Entry entry;
  };
  void open_shard(const std::string& name, std::uint64_t records, std::uint64_t bytes);
  Location locate(std::int64_t index) const;

  std::filesystem::path folder_;
  PackedInfo info_;
  std::vector<Shard> shards_;
  std::vector<std::int64_t> begins_{0};  // number of each shard's first record; then the number of all records
};

// The first record that can be read, which says what the others are like; the second form is without its payload. Throws DataError: no records, or none that can be read.
Record first_good_record(const RecordReader& records, std::vector<std::uint8_t>& scratch);
Record first_good_record(const RecordReader& records);  // without its payload

// Does what the public open_packed does, with records that were opened before.
std::shared_ptr<const Dataset> open_packed(std::shared_ptr<const RecordReader> records,
                                           const ImageTransforms& transforms);

}  // namespace lockstep
