// SPDX-License-Identifier: Apache-2.0
// Compiled here, with the vectors of this build; Debian's library has those of the oldest x86-64.
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <cctype>
#include <iomanip>
#include <regex>

#include <nlohmann/json.hpp>

#include "lockstep/base/sockets/local_socket.h"
#include "lockstep/base/text.h"
#include "lockstep/base/to_size.h"
#include "lockstep/data/formats/readers.h"
#include "lockstep/data/webdataset/shards.h"

namespace lockstep {
namespace {

// "train-{000..012}.tar" -> train-000.tar, train-001.tar, ..., as a shell does
std::vector<fs::path> expanded(const std::string& pattern) {
  static const std::regex kRange(R"((.*?)\{(\d{1,6})\.\.(\d{1,6})\}(.*))");
  std::smatch parts;
  if (!std::regex_match(pattern, parts, kRange)) return {pattern};
  std::vector<fs::path> all;
  const int last = std::stoi(parts[3]), digits = to_int(parts[2].length());
  for (int i = std::stoi(parts[2]); i <= last; ++i)
    std::ranges::copy(expanded(concat(parts[1], std::setfill('0'), std::setw(digits), i, parts[4])),
                      std::back_inserter(all));
  return all;
}

// "a/b.seg.PNG" -> "a/b", "seg.png", as WebDataset does; a name without both belongs to no sample.
std::pair<std::string, std::string> key_of(const std::string& name) {
  const size_t base = name.rfind('/') + 1, dot = name.find('.', base);
  if (dot == std::string::npos || dot == base) return {};
  std::string extension = name.substr(dot + 1);
  std::ranges::transform(extension, extension.begin(), [](unsigned char c) { return std::tolower(c); });
  return {name.substr(0, dot), extension};
}

std::optional<int64_t> target_in(std::string text) {
  text.erase(text.find_last_not_of(" \r\n") + 1);
  int64_t target = 0;
  return parse_int(text, target) ? std::optional(target) : std::nullopt;
}

}  // namespace

uint64_t checksum_of(ByteView content, int64_t target) {
  return XXH3_64bits_withSeed(content.data(), content.size(), static_cast<XXH64_hash_t>(target));
}

// Compressed ones are listed too, to be refused.
std::vector<fs::path> tars_in(const fs::path& folder) {
  std::vector<fs::path> shards;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    const std::string name = entry.path().filename();
    if (name.ends_with(".tar") || name.ends_with(".tar.gz") || name.ends_with(".tgz")) shards.push_back(entry.path());
  }
  std::ranges::sort(shards);
  return shards;
}

ShardReader::ShardReader(const fs::path& path, int64_t classes) {
  constexpr int64_t kMostClasses = 1 << 24;  // a larger target is no class
  raise_descriptor_limit();
  const fs::path description = path / kShardsFile;
  if (fs::exists(description)) {
    open_folder(description);
  } else {
    info_.name = (path.has_filename() ? path : path.parent_path()).filename().string();
    const auto found = fs::is_directory(path) ? tars_in(path) : expanded(path.string());
    std::ranges::for_each(found, [&](const fs::path& shard) { add_shard(shard); });
    for (const Entry& entry : entries_)
      if (entry.target.value_or(kMostClasses) < kMostClasses) classes = std::max(classes, *entry.target + 1);
  }
  info_.classes = std::max(info_.classes, classes);
  for (int64_t i = 0; i < size(); ++i) {
    try {
      first_ = read(i, scratch_);
      return;
    } catch (const DataError&) {  // reported, or skipped, when a batch needs it
      if (i + 1 == size()) throw;
    }
  }
  throw DataError({.what = concat(path.string(), " holds no samples"),
                   .likely = "no shards (*.tar), or no .jpg, .jpeg, .png, .npy and .cls files in them"});
}

void ShardReader::open_folder(const fs::path& description) {
  using Json = nlohmann::ordered_json;
  const DataFile file(description);
  try {
    const Json json = Json::parse(file.read_all());
    if (json.empty()) throw damaged_shard(file, 0, "lockstep data pack did not finish this folder");
    info_ = {.name = json.at("name"), .classes = json.at("classes"), .class_names = json.at("class_names")};
    for (const Json& shard : json.at("shardlist")) {
      size_t sample = entries_.size();
      add_shard(description.parent_path() / fs::path(shard.at("url").get<std::string>()).filename());
      const std::vector<uint64_t> checksums = shard.at("xxh3");
      if (checksums.size() != entries_.size() - sample)
        throw damaged_shard(shards_.back(), 0, concat(checksums.size(), " samples expected"));
      for (const uint64_t checksum : checksums) entries_[sample++].checksum = checksum;
    }
  } catch (const Json::exception& error) {
    throw damaged_shard(file, 0, error.what());
  }
}

void ShardReader::add_shard(const fs::path& path) {
  const DataFile& shard = shards_.emplace_back(path);
  std::string last;
  for (bool open = false; const TarFile& file : files_in_tar(shard)) {
    const auto [key, extension] = key_of(file.name);
    if (key.empty()) continue;
    if (std::exchange(last, key) != key) open = false;
    const bool image = extension == "jpg" || extension == "jpeg" || extension == "png", target = extension == "cls";
    if (!image && !target && extension != "npy") continue;
    if (!std::exchange(open, true)) entries_.push_back({.shard = shards_.size() - 1, .offset = file.offset});
    Entry& entry = entries_.back();
    if (target ? entry.target.has_value() : entry.kind != Entry::kNone)
      throw damaged_shard(shard, file.offset, concat(file.name, " is a second target, image or array of its sample"));
    if (target) {
      entry.target = target_in(text_at(shard, file.offset, file.bytes));
      continue;
    }
    entry.offset = file.offset;
    entry.bytes = file.bytes;
    entry.kind = image ? Entry::kImage : Entry::kArray;
  }
}

uint64_t ShardReader::bytes() const {
  uint64_t bytes = 0;
  for (const DataFile& shard : shards_) bytes += shard.size();
  return bytes;
}

std::vector<int64_t> ShardReader::shard_sizes() const {
  std::vector<int64_t> sizes(shards_.size());
  for (const Entry& entry : entries_) ++sizes[entry.shard];
  return sizes;
}

ShardSample ShardReader::read(int64_t index, Bytes& scratch) const {
  const Entry& entry = entries_[to_size(index)];
  const DataFile& shard = shards_[entry.shard];
  const auto refuse = [&](const std::string& why) { return damaged_shard(shard, entry.offset, why); };
  if (!entry.target) throw refuse("a sample has no .cls file with a whole number");
  if (entry.kind == Entry::kNone) throw refuse("a sample has no .jpg, .jpeg, .png or .npy file");
  scratch.resize(entry.bytes);
  shard.read(entry.offset, scratch);
  if (entry.checksum != 0 && checksum_of(scratch, *entry.target) != entry.checksum)
    throw refuse("a sample's checksum does not match its content");
  ShardSample sample{.target = *entry.target, .encoded = entry.kind == Entry::kImage, .payload = scratch};
  if (sample.encoded) return sample;
  NpyHeader header = [&] {
    try {
      return parse_npy(scratch, scratch.size(), "");
    } catch (const DataError& error) {
      throw refuse(error.text().what);
    }
  }();
  if (header.fortran || header.dtype == torch::kBool || header.bytes % sizeof(double) != 0)
    throw refuse("an array of bool, in Fortran order or not aligned");
  sample.dtype = header.dtype;
  sample.shape = std::move(header.shape);
  sample.payload = sample.payload.subspan(header.bytes);
  return sample;
}

// The loader announces the batch after the one being made, so the disk reads one batch while the workers decode another.
// The kernel's own read-ahead fetches a sample of less than 64 KiB with its neighbours in the window.
void ShardReader::will_read(Indices indices) const {
  constexpr uint64_t kWorthACall = uint64_t{64} << 10;
  for (const int64_t index : indices) {
    const Entry& entry = entries_[to_size(index)];
    if (entry.bytes >= kWorthACall) shards_[entry.shard].will_need(entry.offset, entry.bytes);
  }
}

std::string ShardReader::origin(int64_t index) const {
  const Entry& entry = entries_[to_size(index)];
  return concat(shards_[entry.shard].path().string(), ", offset ", entry.offset);
}

}  // namespace lockstep
