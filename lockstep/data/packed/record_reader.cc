// SPDX-License-Identifier: Apache-2.0
// Compiled here, with the vectors of this build; Debian's library has those of the oldest x86-64.
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>

#include <nlohmann/json.hpp>

#include "lockstep/base/text.h"
#include "lockstep/base/to_size.h"
#include "lockstep/data/formats/readers.h"
#include "lockstep/data/packed/packed_records.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

using Json = nlohmann::ordered_json;

DataError damaged_pack(const std::filesystem::path& file, const std::string& what) {
  return DataError({.what = concat(file.filename().string(), " is not what lockstep data pack writes: ", what),
                    .here = file.string(),
                    .likely = "an interrupted copy, or a file that was changed",
                    .next = "copy it again, or pack the data again"});
}

Json read_info(const std::filesystem::path& folder) {
  const std::filesystem::path path = folder / packed::kInfoFile;
  if (!std::filesystem::exists(path))
    throw DataError({.what = concat("no packed data in ", folder.string()),
                     .here = path.string(),
                     .likely = "a wrong path, or lockstep data pack was interrupted"});
  const Json json = Json::parse(DataFile(path).read_all());
  if (json.at("format") != packed::kFormatName || json.at("version") != packed::ShardHeader{}.version)
    throw damaged_pack(path, "another format or version");
  return json;
}

}  // namespace

RecordReader::RecordReader(std::filesystem::path folder) : folder_(std::move(folder)) {
  try {
    const Json json = read_info(folder_);
    info_ = {.name = json.at("name"), .classes = json.at("classes"), .class_names = json.at("class_names")};
    for (const Json& shard : json.at("shards")) open_shard(shard.at("file"), shard.at("records"), shard.at("bytes"));
  } catch (const Json::exception& error) {
    throw damaged_pack(folder_ / packed::kInfoFile, error.what());
  }
  if (info_.classes < 0) throw damaged_pack(folder_ / packed::kInfoFile, "a negative number of classes");
}

void RecordReader::open_shard(const std::string& name, std::uint64_t records, std::uint64_t bytes) {
  const std::filesystem::path path = folder_ / name;
  if (std::filesystem::path(name).filename() != name) throw damaged_pack(path, "its shard is outside its folder");
  DataFile file(path);
  constexpr std::uint64_t kLeast = sizeof(packed::ShardHeader) + sizeof(packed::Trailer);
  if (file.size() != bytes || bytes < kLeast)
    throw damaged_pack(path, concat(bytes, " bytes expected, ", file.size(), " found"));
  const std::uint64_t index_end = bytes - sizeof(packed::Trailer);
  const auto trailer = file.read_at<packed::Trailer>(index_end);
  if (file.read_at<packed::ShardHeader>(0) != packed::ShardHeader{} || trailer.mark != packed::Trailer::kMark)
    throw damaged_pack(path, "no header or trailer");
  if (trailer.records != records || records > (bytes - kLeast) / sizeof(packed::Entry) ||
      trailer.index_offset != index_end - records * sizeof(packed::Entry))
    throw damaged_pack(path, "its index is not where it should be");
  std::vector<std::uint8_t> index(records * sizeof(packed::Entry));
  file.read(trailer.index_offset, index);
  if (XXH3_64bits(index.data(), index.size()) != trailer.checksum)
    throw damaged_pack(path, "the checksum of its index does not match");
  shards_.push_back({std::move(file), trailer});
  begins_.push_back(begins_.back() + static_cast<std::int64_t>(records));
}

std::uint64_t RecordReader::bytes() const {
  std::uint64_t bytes = 0;
  for (const Shard& shard : shards_) bytes += shard.file.size();
  return bytes;
}

std::vector<std::int64_t> RecordReader::shard_sizes() const {
  std::vector<std::int64_t> sizes;
  for (const Shard& shard : shards_) sizes.push_back(static_cast<std::int64_t>(shard.trailer.records));
  return sizes;
}

RecordReader::Location RecordReader::locate(std::int64_t index) const {
  const auto begin = std::prev(std::ranges::upper_bound(begins_, index));
  const Shard& shard = shards_[to_size(begin - begins_.begin())];
  const std::int64_t index_in_shard = index - *begin;
  const auto entry =
      shard.file.read_at<packed::Entry>(shard.trailer.index_offset + to_size(index_in_shard) * sizeof(packed::Entry));
  if (entry.offset > shard.trailer.index_offset || entry.bytes > shard.trailer.index_offset - entry.offset ||
      entry.bytes < sizeof(packed::RecordHeader))
    throw damaged_pack(shard.file.path(), concat("record ", index_in_shard, " lies outside the shard"));
  return {shard, index_in_shard, entry};
}

// The checksum comes first: what follows reads bytes that are as the writer left them, and still checks them, because a
// writer may be wrong too.
Record RecordReader::read(std::int64_t index, std::vector<std::uint8_t>& scratch) const {
  const auto& [shard, index_in_shard, entry] = locate(index);
  const auto refuse = [&, at = index_in_shard](const char* why) {
    return damaged_pack(shard.file.path(), concat("record ", at, ": ", why));
  };
  scratch.resize(entry.bytes);
  shard.file.read(entry.offset, scratch);
  const std::uint8_t* bytes = scratch.data();
  if (XXH3_64bits(bytes, entry.bytes) != entry.checksum) throw refuse("its checksum does not match its content");
  const auto header = packed::read_at<packed::RecordHeader>(bytes);
  const std::uint64_t begin = sizeof header + sizeof(std::int64_t) * header.dimensions;
  if (header.encoded > 1 || header.dtype >= packed::kDtypes.size() || header.dimensions > packed::kMostDimensions ||
      begin > entry.bytes)
    throw refuse("an impossible header");
  Record record{.target = header.target,
                .encoded = header.encoded == 1,
                .dtype = packed::kDtypes[header.dtype],
                .payload = {bytes + begin, entry.bytes - begin}};
  for (const std::uint8_t* at = bytes + sizeof header; at < bytes + begin; at += sizeof(std::int64_t))
    record.shape.push_back(packed::read_at<std::int64_t>(at));
  const auto expected = product(record.shape, static_cast<std::int64_t>(c10::elementSize(record.dtype)));
  if (!expected) throw refuse("an impossible shape");
  if (!record.encoded && *expected != std::ssize(record.payload))
    throw refuse("a shape that is not that of its values");
  return record;
}

// The loader announces the batch after the one being made, so the disk reads one batch while the workers decode another.
// A record of less than 64 KiB is not worth a system call: the kernel's own read-ahead, triggered by the page faults of
// its neighbours in the window, fetches it.
void RecordReader::will_read(std::span<const std::int64_t> indices) const {
  constexpr std::uint64_t kWorthACall = std::uint64_t{64} << 10;
  for (const std::int64_t index : indices) {
    const Location found = locate(index);
    if (found.entry.bytes >= kWorthACall) found.shard.file.will_need(found.entry.offset, found.entry.bytes);
  }
}

std::string RecordReader::origin(std::int64_t index) const {
  const Location found = locate(index);
  return concat(found.shard.file.path().string(), ", record ", found.index);
}

}  // namespace lockstep
