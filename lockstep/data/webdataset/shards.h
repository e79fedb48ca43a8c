// SPDX-License-Identifier: Apache-2.0
// data/webdataset/shards.h: reads and writes shards of WebDataset: tar files in which the files of a sample follow each
// other. docs/data.md says what they hold.
//
// Flow:    a dataset -> ShardWriter -> files -> ShardReader -> a dataset
// Threads: ShardReader is const after construction; ShardWriter belongs to one thread
// Ranks:   no communication; one process writes a folder
#pragma once

#include "lockstep/base/files/file.h"
#include "lockstep/data/formats/data_file.h"
#include "lockstep/datasets.h"
#include "lockstep/error.h"

namespace lockstep {

constexpr const char* kShardsFile = "shards.json";  // of ShardWriter: checksums, classes

// A sample as it is stored.
struct ShardSample {
  int64_t target = 0;
  bool encoded = false;                     // the payload is an image's file, and has no shape
  torch::ScalarType dtype = torch::kUInt8;  // of an array
  std::vector<int64_t> shape{};             // of an array
  ByteView payload{};                       // valid until the memory that it was read into changes

  bool is_image() const { return encoded || (dtype == torch::kUInt8 && shape.size() == 3); }
};

struct ShardInfo {
  std::string name;
  int64_t classes = 0;  // 0: the target is no class
  std::vector<std::string> class_names{};
};

class ShardWriter {
 public:
  // Makes the folder if it is missing. A shard is closed once it has `shard_bytes`. Throws SystemError; UsageError:
  // the folder holds shards already.
  ShardWriter(fs::path folder, uint64_t shard_bytes = uint64_t{256} << 20);
  void add(const ShardSample& sample);  // throws SystemError: a full disk
  void finish(const ShardInfo& info);   // blocks until all is on the disk; without it readers refuse the folder

 private:
  void close_shard();

  fs::path folder_;
  uint64_t shard_bytes_;
  std::optional<AtomicFile> file_;  // the last shard, while it is open
  uint64_t written_ = 0;            // to it
  int64_t samples_ = 0;
  std::vector<std::vector<uint64_t>> checksums_;  // of each shard's samples
};

class ShardReader {
 public:
  // path: a folder, or files, as open_dataset takes them. Reads all headers and targets. There are at least `classes`
  // classes. Throws DataError naming the file: not finished, missing, cut, damaged, compressed, two images of a sample, no
  // sample that can be read.
  explicit ShardReader(const fs::path& path, int64_t classes = 0);

  const ShardInfo& info() const { return info_; }
  const ShardSample& first() const { return first_; }  // that can be read: it says what the others are like
  int64_t size() const { return std::ssize(entries_); }
  uint64_t bytes() const;  // of all shards
  std::vector<int64_t> shard_sizes() const;

  // Reads it into `scratch`. Throws DataError naming shard and offset: no target, no image or array, damaged.
  ShardSample read(int64_t index, Bytes& scratch) const;
  void will_read(Indices indices) const;  // starts reading them from the disk
  std::string origin(int64_t index) const;

 private:
  struct Entry {
    size_t shard;
    uint64_t offset;  // of a file of the sample: its image or array, if it has one
    uint64_t bytes = 0;
    uint64_t checksum = 0;  // 0: not known
    std::optional<int64_t> target{};
    enum { kNone, kImage, kArray } kind = kNone;
  };
  void open_folder(const fs::path& description);
  void add_shard(const fs::path& path);

  ShardInfo info_;
  std::vector<DataFile> shards_;
  std::vector<Entry> entries_;
  Bytes scratch_;  // of first_
  ShardSample first_;
};

uint64_t checksum_of(ByteView content, int64_t target);  // of an image or array
std::vector<fs::path> tars_in(const fs::path& folder);   // by name

DatasetPtr dataset_of(std::shared_ptr<const ShardReader> samples, const ImageTransforms& transforms);

// ---- Tars: where the files in one lie, and headers for new ones. docs/design/dependencies.md says why not libarchive.

constexpr uint64_t kTarBlock = 512;  // headers and contents begin at multiples of it

struct TarFile {
  std::string name;
  uint64_t offset;  // of its content
  uint64_t bytes;
};

DataError damaged_shard(const DataFile& file, uint64_t offset, const std::string& what);
std::string text_at(const DataFile& file, uint64_t offset, uint64_t bytes);

// Its regular files: of ustar, pax and GNU's long names. Throws DataError: compressed, damaged, cut, links, special files.
std::vector<TarFile> files_in_tar(const DataFile& tar);
std::string tar_header(const std::string& name, uint64_t bytes);  // throws UsageError: 8 GiB or more

}  // namespace lockstep
