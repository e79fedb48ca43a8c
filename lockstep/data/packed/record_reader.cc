// SPDX-License-Identifier: Apache-2.0
// Compiled here, with the vectors of this build; Debian's library has those of the oldest x86-64.
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>

#include <nlohmann/json.hpp>

#include "lockstep/base/text.h"
#include "lockstep/base/to_size.h"
#include "lockstep/data/packed/packed_format.h"
#include "lockstep/data/packed/packed_records.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

using Json = nlohmann::ordered_json;
using packed::number_at;

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
                     .likely = "a wrong path, or lockstep data pack was interrupted",
                     .next = "name the folder that lockstep data pack wrote"});
  const MappedFile file(path);
  const Json json = Json::parse(file.bytes().begin(), file.bytes().end());
  if (json.at("format") != packed::kFormatName || json.at("version") != packed::kVersion)
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
  if (std::filesystem::path(name).filename() != name) throw damaged_pack(path, "its shard is outside of its folder");
  MappedFile file(path);
  const auto content = file.bytes();
  if (content.size() != bytes || bytes < packed::kHeaderBytes + packed::kTrailerBytes)
    throw damaged_pack(path, concat(bytes, " bytes expected, ", content.size(), " found"));
  const std::uint8_t* trailer = content.data() + bytes - packed::kTrailerBytes;
  const bool named = std::memcmp(content.data(), packed::kBegin.data(), packed::kBegin.size()) == 0 &&
                     std::memcmp(trailer + 24, packed::kEnd.data(), packed::kEnd.size()) == 0;
  if (!named || number_at(content.data() + 8) != packed::kVersion) throw damaged_pack(path, "no header or trailer");
  const std::uint64_t index_offset = number_at(trailer);
  const std::uint64_t most = (bytes - packed::kHeaderBytes - packed::kTrailerBytes) / packed::kEntryBytes;
  if (number_at(trailer + 8) != records || records > most ||
      index_offset != bytes - packed::kTrailerBytes - records * packed::kEntryBytes)
    throw damaged_pack(path, "its index is not where it should be");
  if (XXH3_64bits(content.data() + index_offset, records * packed::kEntryBytes) != number_at(trailer + 16))
    throw damaged_pack(path, "the checksum of its index does not match");
  shards_.push_back({std::move(file), index_offset, static_cast<std::int64_t>(records)});
  begins_.push_back(begins_.back() + static_cast<std::int64_t>(records));
}

std::uint64_t RecordReader::bytes() const {
  std::uint64_t bytes = 0;
  for (const Shard& shard : shards_) bytes += shard.file.bytes().size();
  return bytes;
}

std::vector<std::int64_t> RecordReader::shard_sizes() const {
  std::vector<std::int64_t> sizes;
  for (const Shard& shard : shards_) sizes.push_back(shard.records);
  return sizes;
}

RecordReader::Place RecordReader::place_of(std::int64_t index) const {
  const auto after = std::upper_bound(begins_.begin(), begins_.end(), index);
  const std::size_t shard = to_size(after - begins_.begin()) - 1;
  const Shard& found = shards_[shard];
  const std::uint8_t* entry = found.file.bytes().data() + found.index_offset +
                              static_cast<std::uint64_t>(index - begins_[shard]) * packed::kEntryBytes;
  const Place place{shard, number_at(entry), number_at(entry + 8), number_at(entry + 16)};
  if (place.offset > found.index_offset || place.bytes > found.index_offset - place.offset ||
      place.bytes < packed::kRecordHeaderBytes)
    throw damaged_pack(found.file.path(), concat("record ", index - begins_[shard], " lies outside of the shard"));
  return place;
}

// Bytes: target 0-7, kind 8, dtype 9, dimensions 10, then 8 a dimension from 16 on. The checksum comes first: what
// follows reads bytes that are as the writer left them, and still checks them, because a writer may be wrong too.
Record RecordReader::read(std::int64_t index) const {
  const Place place = place_of(index);
  const MappedFile& file = shards_[place.shard].file;
  const std::uint8_t* bytes = file.bytes().data() + place.offset;
  const auto refuse = [&](const char* why) {
    return damaged_pack(file.path(), concat("record ", index - begins_[place.shard], ": ", why));
  };
  if (XXH3_64bits(bytes, place.bytes) != place.checksum) throw refuse("its checksum does not match its content");
  const std::size_t dimensions = bytes[10];
  const std::uint64_t begin = packed::kRecordHeaderBytes + 8 * dimensions;
  if (bytes[8] > packed::kEncodedImage || bytes[9] >= packed::kDtypes.size() || dimensions > packed::kMostDimensions ||
      begin > place.bytes)
    throw refuse("a header that makes no sense");
  Record record{.target = static_cast<std::int64_t>(number_at(bytes)),
                .encoded = bytes[8] == packed::kEncodedImage,
                .dtype = packed::kDtypes[bytes[9]],
                .payload = {bytes + begin, place.bytes - begin}};
  auto expected = static_cast<std::int64_t>(c10::elementSize(record.dtype));
  for (std::size_t i = 0; i < dimensions; ++i) {
    const auto size = static_cast<std::int64_t>(number_at(bytes + packed::kRecordHeaderBytes + 8 * i));
    if (size < 0 || __builtin_mul_overflow(expected, size, &expected)) throw refuse("a shape that makes no sense");
    record.shape.push_back(size);
  }
  if (!record.encoded && expected != static_cast<std::int64_t>(record.payload.size()))
    throw refuse("a shape that is not that of its values");
  return record;
}

// The loader announces the batch after the one being made, so the disk reads one batch while the workers decode another.
// A record of less than 64 KiB is not worth a system call: the kernel's own read-ahead, triggered by the page faults of
// its neighbours in the window, fetches it.
void RecordReader::will_read(std::span<const std::int64_t> indices) const {
  constexpr std::uint64_t kWorthACall = std::uint64_t{64} << 10;
  for (const std::int64_t index : indices) {
    const Place place = place_of(index);
    if (place.bytes >= kWorthACall) shards_[place.shard].file.will_need(place.offset, place.bytes);
  }
}

std::string RecordReader::origin(std::int64_t index) const {
  const Place place = place_of(index);
  return concat(shards_[place.shard].file.path().string(), ", record ", index - begins_[place.shard]);
}

}  // namespace lockstep
