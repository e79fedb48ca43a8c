// SPDX-License-Identifier: Apache-2.0
#include <xxhash.h>

#include <nlohmann/json.hpp>

#include "lockstep/base/cache_line.h"
#include "lockstep/base/text.h"
#include "lockstep/data/packed/packed_format.h"
#include "lockstep/data/packed/packed_records.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::size_t kMegabyte = std::size_t{1} << 20;

void append(std::vector<std::uint8_t>& bytes, std::uint64_t number) {
  const auto* first = reinterpret_cast<const std::uint8_t*>(&number);
  bytes.insert(bytes.end(), first, first + sizeof number);
}

void append(std::vector<std::uint8_t>& bytes, std::string_view text) {
  bytes.insert(bytes.end(), text.begin(), text.end());
}

std::uint8_t code_of(torch::ScalarType dtype) {
  for (std::size_t i = 0; i < packed::kDtypes.size(); ++i)
    if (packed::kDtypes[i] == dtype) return static_cast<std::uint8_t>(i);
  throw UsageError({.what = concat("records of ", c10::toString(dtype), " can't be packed")});
}

// Appends the record, padded to where the next one begins; returns its size without the padding.
std::size_t append(std::vector<std::uint8_t>& bytes, const Record& record) {
  if (record.shape.size() > packed::kMostDimensions)
    throw UsageError({.what = concat("a record of ", record.shape.size(), " dimensions can't be packed")});
  const std::size_t begin = bytes.size();
  append(bytes, static_cast<std::uint64_t>(record.target));
  bytes.push_back(record.encoded ? packed::kEncodedImage : packed::kArray);
  bytes.push_back(code_of(record.dtype));
  bytes.push_back(static_cast<std::uint8_t>(record.shape.size()));
  bytes.resize(begin + packed::kRecordHeaderBytes);
  for (const std::int64_t size : record.shape) append(bytes, static_cast<std::uint64_t>(size));
  bytes.insert(bytes.end(), record.payload.begin(), record.payload.end());
  const std::size_t used = bytes.size() - begin;
  bytes.resize(begin + round_up(used, packed::kAlignment));
  return used;
}

std::string shard_name(std::size_t number) {
  const std::string digits = std::to_string(number);
  return concat(std::string(digits.size() < 5 ? 5 - digits.size() : 0, '0'), digits, ".lsr");
}

}  // namespace

RecordWriter::RecordWriter(std::filesystem::path folder, std::uint64_t shard_bytes)
    : folder_(std::move(folder)), shard_bytes_(shard_bytes) {
  std::error_code error;
  std::filesystem::create_directories(folder_, error);
  if (error) throw SystemError({.what = concat("can't make the folder ", folder_.string(), ": ", error.message())});
  if (std::filesystem::exists(folder_ / packed::kInfoFile))
    throw UsageError({.what = concat(folder_.string(), " holds packed data already"), .next = "name another folder"});
}

void RecordWriter::open_shard() {
  file_.emplace(folder_ / shard_name(shards_.size()));
  written_ = 0;
  append(pending_, packed::kBegin);
  append(pending_, packed::kVersion);
}

// Writes whole megabytes only: the page cache then holds large folios, and mapping them takes a third of the page faults.
void RecordWriter::write_whole_megabytes() {
  const std::size_t bytes = pending_.size() / kMegabyte * kMegabyte;
  file_->write(pending_.data(), bytes);
  pending_.erase(pending_.begin(), pending_.begin() + static_cast<std::ptrdiff_t>(bytes));
  written_ += bytes;
}

void RecordWriter::add(const Record& record) {
  if (!file_) open_shard();
  const std::size_t begin = pending_.size();
  const std::size_t bytes = append(pending_, record);
  index_.push_back({written_ + begin, bytes, XXH3_64bits(pending_.data() + begin, bytes)});
  if (pending_.size() >= kMegabyte) write_whole_megabytes();
  if (written_ + pending_.size() >= shard_bytes_) close_shard();
}

void RecordWriter::close_shard() {
  const std::size_t begin = pending_.size();
  const std::uint64_t index_offset = written_ + begin;
  for (const Entry& entry : index_)
    for (const std::uint64_t number : {entry.offset, entry.bytes, entry.checksum}) append(pending_, number);
  const std::uint64_t checksum = XXH3_64bits(pending_.data() + begin, pending_.size() - begin);
  for (const std::uint64_t number : {index_offset, std::uint64_t{index_.size()}, checksum}) append(pending_, number);
  append(pending_, packed::kEnd);
  file_->write(pending_.data(), pending_.size());
  file_->commit();
  file_.reset();
  shards_.push_back({shard_name(shards_.size()), index_.size(), written_ + pending_.size()});
  pending_.clear();
  index_.clear();
}

void RecordWriter::finish(const PackedInfo& info) {
  if (file_) close_shard();
  Json shards = Json::array();
  for (const Shard& shard : shards_)
    shards.push_back({{"file", shard.file}, {"records", shard.records}, {"bytes", shard.bytes}});
  const Json json = {{"format", packed::kFormatName}, {"version", packed::kVersion},     {"name", info.name},
                     {"classes", info.classes},       {"class_names", info.class_names}, {"shards", shards}};
  write_file(folder_ / packed::kInfoFile, json.dump(2) + "\n");
}

}  // namespace lockstep
