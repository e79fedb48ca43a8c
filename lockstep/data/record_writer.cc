#include <xxhash.h>

#include <nlohmann/json.hpp>

#include "lockstep/base/error.h"
#include "lockstep/base/text.h"
#include "lockstep/data/packed_format.h"
#include "lockstep/data/packed_records.h"

namespace lockstep {
namespace {

using Json = nlohmann::ordered_json;

void append(std::vector<std::uint8_t>& bytes, std::uint64_t number) {
  const auto* first = reinterpret_cast<const std::uint8_t*>(&number);
  bytes.insert(bytes.end(), first, first + sizeof number);
}

void append(std::vector<std::uint8_t>& bytes, std::string_view text) { bytes.insert(bytes.end(), text.begin(), text.end()); }

std::uint8_t code_of(torch::ScalarType dtype) {
  for (std::size_t i = 0; i < packed::kDtypes.size(); ++i)
    if (packed::kDtypes[i] == dtype) return static_cast<std::uint8_t>(i);
  throw UsageError({.what = concat("records of ", c10::toString(dtype), " can't be packed")});
}

// The whole record with padding up to the next one; `bytes_used` without it.
std::vector<std::uint8_t> serialised(const Record& record, std::uint64_t& bytes_used) {
  if (record.shape.size() > packed::kMostDimensions)
    throw UsageError({.what = concat("a record of ", record.shape.size(), " dimensions can't be packed")});
  std::vector<std::uint8_t> bytes;
  append(bytes, static_cast<std::uint64_t>(record.target));
  bytes.push_back(record.encoded ? packed::kEncodedImage : packed::kArray);
  bytes.push_back(code_of(record.dtype));
  bytes.push_back(static_cast<std::uint8_t>(record.shape.size()));
  bytes.resize(packed::kRecordHeaderBytes);
  for (const std::int64_t size : record.shape) append(bytes, static_cast<std::uint64_t>(size));
  bytes.insert(bytes.end(), record.payload.begin(), record.payload.end());
  bytes_used = bytes.size();
  bytes.resize((bytes.size() + packed::kAlignment - 1) / packed::kAlignment * packed::kAlignment);
  return bytes;
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
  std::vector<std::uint8_t> header;
  append(header, packed::kBegin);
  append(header, packed::kVersion);
  file_->write(header.data(), header.size());
  offset_ = header.size();
}

void RecordWriter::add(const Record& record) {
  if (!file_) open_shard();
  std::uint64_t bytes_used = 0;
  const std::vector<std::uint8_t> bytes = serialised(record, bytes_used);
  file_->write(bytes.data(), bytes.size());
  index_.push_back({offset_, bytes_used, XXH3_64bits(bytes.data(), bytes_used)});
  offset_ += bytes.size();
  if (offset_ >= shard_bytes_) close_shard();
}

void RecordWriter::close_shard() {
  std::vector<std::uint8_t> end;
  for (const Entry& entry : index_)
    for (const std::uint64_t number : {entry.offset, entry.bytes, entry.checksum}) append(end, number);
  const std::uint64_t checksum = XXH3_64bits(end.data(), end.size());
  for (const std::uint64_t number : {offset_, std::uint64_t{index_.size()}, checksum}) append(end, number);
  append(end, packed::kEnd);
  file_->write(end.data(), end.size());
  file_->commit();
  file_.reset();
  shards_.push_back({shard_name(shards_.size()), index_.size(), offset_ + end.size()});
  index_.clear();
}

void RecordWriter::finish(const PackedInfo& info) {
  if (file_) close_shard();
  Json shards = Json::array();
  for (const Shard& shard : shards_)
    shards.push_back({{"file", shard.file}, {"records", shard.records}, {"bytes", shard.bytes}});
  const Json json = {{"format", packed::kFormatName}, {"version", packed::kVersion},
                     {"name", info.name},             {"classes", info.classes},
                     {"class_names", info.class_names}, {"shards", shards}};
  write_file(folder_ / packed::kInfoFile, json.dump(2) + "\n");
}

}  // namespace lockstep
