// SPDX-License-Identifier: Apache-2.0
#include <xxhash.h>

#include <algorithm>
#include <iomanip>

#include <nlohmann/json.hpp>

#include "lockstep/base/cache_line.h"
#include "lockstep/base/text.h"
#include "lockstep/data/packed/packed_records.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

constexpr std::size_t kMegabyte = std::size_t{1} << 20;

template <class T>
void append(std::vector<std::uint8_t>& bytes, std::span<const T> values) {
  const auto* first = reinterpret_cast<const std::uint8_t*>(values.data());
  bytes.insert(bytes.end(), first, first + values.size_bytes());
}

template <class T>
void append(std::vector<std::uint8_t>& bytes, const T& value) {
  append(bytes, std::span<const T>(&value, 1));
}

packed::RecordHeader header_of(const Record& record) {
  const auto* const dtype = std::ranges::find(packed::kDtypes, record.dtype);
  if (dtype == packed::kDtypes.end())
    throw UsageError({.what = concat("records of ", c10::toString(record.dtype), " can't be packed"),
                      .next = "convert them to another dtype"});
  if (record.shape.size() > packed::kMostDimensions)
    throw UsageError({.what = concat("a record of ", record.shape.size(), " dimensions can't be packed")});
  return {.target = record.target,
          .encoded = record.encoded,
          .dtype = static_cast<std::uint8_t>(dtype - packed::kDtypes.begin()),
          .dimensions = static_cast<std::uint8_t>(record.shape.size())};
}

std::string shard_name(std::size_t number) { return concat(std::setfill('0'), std::setw(5), number, ".lsr"); }

}  // namespace

RecordWriter::RecordWriter(std::filesystem::path folder, std::uint64_t shard_bytes)
    : folder_(std::move(folder)), shard_bytes_(shard_bytes) {
  std::error_code error;
  std::filesystem::create_directories(folder_, error);
  if (error) throw SystemError({.what = concat("can't make the folder ", folder_.string(), ": ", error.message())});
  if (std::filesystem::exists(folder_ / packed::kInfoFile))
    throw UsageError({.what = concat(folder_.string(), " holds packed data already"), .next = "name another folder"});
}

// Writes whole megabytes only: the page cache then holds large folios, and mapping them takes a third of the page faults.
void RecordWriter::write_whole_megabytes() {
  const std::size_t bytes = pending_.size() / kMegabyte * kMegabyte;
  file_->write(pending_.data(), bytes);
  pending_.erase(pending_.begin(), pending_.begin() + static_cast<std::ptrdiff_t>(bytes));
  written_ += bytes;
}

// The record is padded to where the next one begins; the padding is no part of it.
void RecordWriter::add(const Record& record) {
  const packed::RecordHeader header = header_of(record);
  if (!file_) {
    file_.emplace(folder_ / shard_name(shards_.size()));
    written_ = 0;
    append(pending_, packed::ShardHeader{});
  }
  const std::size_t begin = pending_.size();
  append(pending_, header);
  append(pending_, std::span(record.shape));
  append(pending_, record.payload);
  const std::size_t bytes = pending_.size() - begin;
  index_.push_back({written_ + begin, bytes, XXH3_64bits(pending_.data() + begin, bytes)});
  pending_.resize(begin + round_up(bytes, packed::kAlignment));
  if (pending_.size() >= kMegabyte) write_whole_megabytes();
  if (written_ + pending_.size() >= shard_bytes_) close_shard();
}

void RecordWriter::close_shard() {
  const std::span<const packed::Entry> index(index_);
  const packed::Trailer trailer{.index_offset = written_ + pending_.size(),
                                .records = index.size(),
                                .checksum = XXH3_64bits(index.data(), index.size_bytes())};
  append(pending_, index);
  append(pending_, trailer);
  file_->write(pending_.data(), pending_.size());
  file_->commit();
  file_.reset();
  shards_.push_back({index_.size(), written_ + pending_.size()});
  pending_.clear();
  index_.clear();
}

void RecordWriter::finish(const PackedInfo& info) {
  using Json = nlohmann::ordered_json;
  if (file_) close_shard();
  Json shards = Json::array();
  for (const Shard& shard : shards_)
    shards.push_back({{"file", shard_name(shards.size())}, {"records", shard.records}, {"bytes", shard.bytes}});
  const Json json = {{"format", packed::kFormatName}, {"version", packed::ShardHeader{}.version}, {"name", info.name},
                     {"classes", info.classes},       {"class_names", info.class_names},          {"shards", shards}};
  write_file(folder_ / packed::kInfoFile, json.dump(2) + "\n");
}

}  // namespace lockstep
