// SPDX-License-Identifier: Apache-2.0
#include "lockstep/checkpoint/shards.h"

#include <iomanip>

#include <nlohmann/json.hpp>

#include "lockstep/base/files/file.h"
#include "lockstep/base/text.h"

namespace lockstep {
namespace {

using ShardMap = std::map<std::string, std::string>;  // tensor -> file

ShardMap read_index(const std::filesystem::path& index) try {
  const auto map = nlohmann::json::parse(read_file(index)).at("weight_map").get<ShardMap>();
  for (const auto& [name, file] : map)
    if (std::filesystem::path(file).filename() != file)
      throw damaged_file(index, concat(file, " is in another folder"));
  if (map.empty()) throw damaged_file(index, "it names no tensor");
  return map;
} catch (const nlohmann::json::exception& error) {
  throw damaged_file(index, error.what());
}

std::set<std::string> files_in(const ShardMap& map) {
  std::set<std::string> files;
  for (const auto& [name, file] : map) files.insert(file);
  return files;
}

}  // namespace

std::vector<TensorFile> split_into_shards(const TensorFile& file, std::size_t most_bytes) {
  std::vector<TensorFile> shards(1, {.tensors = {}, .metadata = file.metadata});
  std::size_t bytes = 0;
  for (const auto& [name, tensor] : file.tensors) {
    if (bytes > 0 && bytes + tensor.nbytes() > most_bytes) {
      shards.push_back({.tensors = {}, .metadata = file.metadata});
      bytes = 0;
    }
    shards.back().tensors[name] = tensor;
    bytes += tensor.nbytes();
  }
  return shards;
}

std::string shard_name(const std::string& stem, std::size_t i, std::size_t shards) {
  return concat(stem, "-", std::setfill('0'), std::setw(5), i + 1, "-of-", std::setw(5), shards, ".safetensors");
}

std::string index_of_shards(const std::string& stem, const std::vector<TensorFile>& shards) {
  std::size_t bytes = 0;
  auto map = nlohmann::ordered_json::object();
  for (std::size_t i = 0; i < shards.size(); ++i)
    for (const auto& [name, tensor] : shards[i].tensors) {
      map[name] = shard_name(stem, i, shards.size());
      bytes += tensor.nbytes();
    }
  return nlohmann::ordered_json{{"metadata", {{"total_size", bytes}}}, {"weight_map", map}}.dump(2) + "\n";
}

std::set<std::string> shards_in(const std::filesystem::path& index) { return files_in(read_index(index)); }

CheckpointReader::CheckpointReader(const std::filesystem::path& path, Checksum checksum) {
  if (path.string().ends_with(kIndexSuffix)) {
    open_shards(path, checksum);
    return;
  }
  files_.emplace_back(bytes_in(path), path, checksum);
  entries_ = files_.front().entries();
  for (const auto& [name, entry] : entries_) file_of_[name] = 0;
}

void CheckpointReader::open_shards(const std::filesystem::path& index, Checksum checksum) {
  const ShardMap map = read_index(index);
  for (const std::string& shard : files_in(map)) {
    const auto path = index.parent_path() / shard;
    if (std::error_code unknown; !std::filesystem::exists(path, unknown) && !unknown)
      throw damaged_file(index, concat(shard, " is missing"));
    files_.emplace_back(bytes_in(path), path, checksum);
    for (const auto& [name, entry] : files_.back().entries()) {
      if (!map.contains(name) || map.at(name) != shard) throw damaged_file(index, concat(name, " is in ", shard));
      entries_[name] = entry;
      file_of_[name] = files_.size() - 1;
    }
  }
  if (entries_.size() != map.size()) throw damaged_file(index, "it names tensors that its files do not have");
}

torch::Tensor CheckpointReader::read(const std::string& name) const { return files_[file_of_.at(name)].read(name); }

TensorFile load_safetensors(const std::filesystem::path& path) {
  const CheckpointReader reader(path, Checksum::kOptional);
  TensorFile file{.tensors = {}, .metadata = reader.metadata()};
  for (const auto& [name, entry] : reader.entries()) file.tensors[name] = reader.read(name);
  return file;
}

}  // namespace lockstep
