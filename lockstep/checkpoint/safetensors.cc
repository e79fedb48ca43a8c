// SPDX-License-Identifier: Apache-2.0
#include "lockstep/checkpoint/safetensors.h"

#include <xxhash.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <iomanip>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "lockstep/base/files/file.h"
#include "lockstep/base/text.h"

namespace lockstep {
namespace {

using Json = nlohmann::ordered_json;

// XXH3 (64 bits) of bytes that come in parts. Against accidents, not against attackers.
class Hash {
 public:
  Hash() : state_(XXH3_createState()) { XXH3_64bits_reset(state_.get()); }
  void add(const void* data, size_t bytes) { XXH3_64bits_update(state_.get(), data, bytes); }
  std::string digits() const {  // 16
    return concat(std::hex, std::setfill('0'), std::setw(16), XXH3_64bits_digest(state_.get()));
  }

 private:
  struct Frees {
    void operator()(XXH3_state_t* state) const { XXH3_freeState(state); }
  };
  std::unique_ptr<XXH3_state_t, Frees> state_;
};

static_assert(std::endian::native == std::endian::little, "safetensors is a little-endian format");

constexpr const char* kMetadata = "__metadata__";
constexpr const char* kChecksum = "lockstep.xxh3";
constexpr size_t kChecksumDigits = 16;
constexpr const char* kNoChecksum = "0000000000000000";  // what the field holds while the checksum is computed
constexpr size_t kLengthBytes = 8;
constexpr size_t kPartBytes = size_t{1} << 20;  // that are read at a time

constexpr std::array<std::pair<torch::ScalarType, const char*>, 18> kDtypes = {{
    {torch::kFloat32, "F32"},
    {torch::kFloat64, "F64"},
    {torch::kFloat16, "F16"},
    {torch::kBFloat16, "BF16"},
    {torch::kInt64, "I64"},
    {torch::kInt32, "I32"},
    {torch::kInt16, "I16"},
    {torch::kUInt8, "U8"},
    {torch::kBool, "BOOL"},
    {torch::kInt8, "I8"},
    {torch::kUInt16, "U16"},
    {torch::kUInt32, "U32"},
    {torch::kUInt64, "U64"},
    {torch::kFloat8_e4m3fn, "F8_E4M3"},
    {torch::kFloat8_e4m3fnuz, "F8_E4M3FNUZ"},
    {torch::kFloat8_e5m2, "F8_E5M2"},
    {torch::kFloat8_e5m2fnuz, "F8_E5M2FNUZ"},
    {torch::kComplexFloat, "C64"},
}};

CheckpointError damaged_file(const std::filesystem::path& origin, const std::string& what) {
  return CheckpointError({.what = concat(origin.string(), " is damaged: ", what),
                          .here = origin.string(),
                          .likely = "an interrupted copy, a full disk, or another file",
                          .next = "remove it to resume from the checkpoint before it"});
}

std::string dtype_name(torch::ScalarType dtype, const std::string& tensor) {
  for (const auto& [type, name] : kDtypes)
    if (type == dtype) return name;
  throw UsageError({.what = concat("safetensors has no dtype for ", tensor, " (", c10::toString(dtype), ")"),
                    .next = "convert it to another dtype"});
}

void require_free_names(const TensorFile& file) {
  if (file.tensors.contains(kMetadata) || file.metadata.contains(kChecksum))
    throw UsageError(
        {.what = concat("a tensor ", kMetadata, " or a key ", kChecksum, " can't be saved: files have their own"),
         .next = "give it another name"});
}

// Position of the checksum's 16 digits in the header; npos in a file of another tool.
size_t checksum_position(const std::string& header) {
  const std::string key = concat('"', kChecksum, "\":\"");
  const size_t found = header.find(key);
  return found == std::string::npos || found + key.size() + kChecksumDigits > header.size() ? std::string::npos
                                                                                            : found + key.size();
}

Json make_header(const TensorFile& file) {
  require_free_names(file);
  Json header;
  Json& metadata = header[kMetadata] = Json::object();
  metadata[kChecksum] = kNoChecksum;
  for (const auto& [key, value] : file.metadata) metadata[key] = value;
  size_t offset = 0;
  for (const auto& [name, tensor] : file.tensors) {
    header[name] = {{"dtype", dtype_name(tensor.scalar_type(), name)},
                    {"shape", tensor.sizes().vec()},
                    {"data_offsets", {offset, offset + tensor.nbytes()}}};
    offset += tensor.nbytes();
  }
  return header;
}

void verify_checksum(const ByteSource& source, std::string header, const std::string& origin, Checksum checksum) {
  if (checksum == Checksum::kTrusted) return;
  const size_t position = checksum_position(header);
  if (position == std::string::npos && checksum == Checksum::kRequired)
    throw damaged_file(origin, "it has no checksum");
  if (position == std::string::npos) return;
  const std::string recorded = header.substr(position, kChecksumDigits);
  header.replace(position, kChecksumDigits, kNoChecksum);
  const uint64_t length = header.size();
  Hash hash;
  hash.add(&length, kLengthBytes);
  hash.add(header.data(), header.size());
  std::string part;
  for (size_t at = kLengthBytes + header.size(); at < source.size; at += part.size()) {
    part.resize(std::min(kPartBytes, source.size - at));
    source.read(at, part.data(), part.size());
    hash.add(part.data(), part.size());
  }
  if (hash.digits() != recorded) throw damaged_file(origin, "its checksum does not match its content");
}

std::string read_header(const ByteSource& source, const std::string& origin) {
  uint64_t length = 0;
  if (source.size < kLengthBytes) throw damaged_file(origin, concat("only ", source.size, " bytes long"));
  source.read(0, &length, kLengthBytes);
  if (length > source.size - kLengthBytes)
    throw damaged_file(origin, concat("its header should have ", length, " bytes, the file has ", source.size));
  std::string header(length, ' ');
  source.read(kLengthBytes, header.data(), header.size());
  return header;
}

torch::ScalarType dtype_of(const std::string& name, const std::string& origin) {
  for (const auto& [type, known] : kDtypes)
    if (name == known) return type;
  throw damaged_file(origin, concat("unknown dtype ", name));
}

// After check_layout().
SafetensorsReader::Entry read_entry(const Json& entry, const std::string& name, const std::string& origin) {
  const auto shape = entry.at("shape").get<std::vector<int64_t>>();
  const auto offsets = entry.at("data_offsets").get<std::array<uint64_t, 2>>();
  const torch::ScalarType dtype = dtype_of(entry.at("dtype").get<std::string>(), origin);
  auto bytes = static_cast<int64_t>(c10::elementSize(dtype));
  for (const int64_t size : shape)
    if (size < 0 || __builtin_mul_overflow(bytes, size, &bytes)) throw damaged_file(origin, concat("shape of ", name));
  if (offsets[1] - offsets[0] != static_cast<uint64_t>(bytes))
    throw damaged_file(origin, concat(name, " lies outside the file"));
  return {.dtype = dtype, .shape = shape, .at = offsets[0]};
}

// Checks what the format demands: in some order the tensors fill the data, without gaps, overlaps or a rest.
void check_layout(const Json& header, size_t data_bytes, const std::string& origin) {
  std::vector<std::array<uint64_t, 2>> parts;
  for (const auto& [name, entry] : header.items())
    if (name != kMetadata) parts.push_back(entry.at("data_offsets").get<std::array<uint64_t, 2>>());
  std::ranges::sort(parts);
  uint64_t end = 0;
  for (const auto& [begin, next] : parts) {
    if (begin != end || next < begin)
      throw damaged_file(origin, concat("its tensors overlap or leave a gap at byte ", std::min(begin, end)));
    end = next;
  }
  if (end != data_bytes) throw damaged_file(origin, concat("its tensors have ", end, " bytes, the file ", data_bytes));
}

// The values in row-major order, from any layout or device. memcpy() passes large copies by the caches, copy_() does not.
void copy_values(const torch::Tensor& tensor, std::byte* into) {
  if (tensor.nbytes() == 0) return;
  if (tensor.is_cpu() && tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg()) {
    std::memcpy(into, tensor.const_data_ptr(), tensor.nbytes());
    return;
  }
  torch::from_blob(into, tensor.sizes(), torch::TensorOptions(tensor.scalar_type())).copy_(tensor.detach());
}

}  // namespace

std::string safetensors_head(const TensorFile& file) {
  std::string header = make_header(file).dump();
  header.resize((header.size() + 7) / 8 * 8, ' ');  // tensors begin at a multiple of 8
  const uint64_t length = header.size();
  return std::string(reinterpret_cast<const char*>(&length), kLengthBytes) + header;
}

size_t tensor_bytes(const TensorFile& file) {
  size_t bytes = 0;
  for (const auto& [name, tensor] : file.tensors) bytes += tensor.nbytes();
  return bytes;
}

void copy_file(const std::string& head, const TensorFile& file, std::byte* into) {
  into = std::ranges::copy(std::as_bytes(std::span(head)), into).out;
  for (const auto& [name, tensor] : file.tensors) {
    copy_values(tensor, into);
    into += tensor.nbytes();
  }
}

void ByteSource::read(size_t at, void* into, size_t bytes) const {
  from_disk ? from_disk(at, into, bytes) : static_cast<void>(std::memcpy(into, mapped.get() + at, bytes));
}

SafetensorsReader::SafetensorsReader(ByteSource source, const std::string& origin, Checksum checksum)
    : source_(std::move(source)) {
  const std::string text = read_header(source_, origin);
  verify_checksum(source_, text, origin, checksum);
  const size_t data = kLengthBytes + text.size();
  try {
    const Json header = Json::parse(text);
    check_layout(header, source_.size - data, origin);
    for (const auto& [name, entry] : header.items()) {
      if (name == kMetadata) {
        metadata_ = entry.get<std::map<std::string, std::string>>();
      } else {
        entries_[name] = read_entry(entry, name, origin);
        entries_[name].at += data;
      }
    }
  } catch (const nlohmann::json::exception& error) {
    throw damaged_file(origin, concat("its header is not what the format says: ", error.what()));
  }
  metadata_.erase(kChecksum);
}

torch::Tensor SafetensorsReader::read(const std::string& name) const {
  const Entry& entry = entries_.at(name);
  if (source_.mapped && entry.at % c10::elementSize(entry.dtype) == 0) {
    auto* const data = const_cast<std::byte*>(source_.mapped.get() + entry.at);
    return torch::from_blob(
        data, entry.shape, [keep = source_.mapped](void*) {}, torch::TensorOptions(entry.dtype));
  }
  torch::Tensor tensor = torch::empty(entry.shape, entry.dtype);
  if (tensor.nbytes() > 0) source_.read(entry.at, tensor.data_ptr(), tensor.nbytes());
  return tensor;
}

void save_safetensors(const std::filesystem::path& path, const TensorFile& file, const FetchTensor& fetch) {
  const std::string head = safetensors_head(file);
  AtomicFile on_disk(path, AtomicFile::Way::kPastCache);
  Hash hash;
  const auto add = [&](const void* data, size_t bytes) {
    hash.add(data, bytes);
    on_disk.write(data, bytes);
  };
  add(head.data(), head.size());
  for (const auto& [name, tensor] : file.tensors) {
    const torch::Tensor values =
        (tensor.is_meta() ? fetch(name) : tensor).detach().to(torch::kCPU).contiguous().resolve_conj().resolve_neg();
    add(values.const_data_ptr(), values.nbytes());
  }
  on_disk.overwrite(checksum_position(head), hash.digits().data(), kChecksumDigits);
  on_disk.commit();
}

void save_safetensors(const std::filesystem::path& path, const TensorFile& file) {
  save_safetensors(path, file, nullptr);
}

// ---- Shards

namespace {

// Not mapped: an error of the disk would be SIGBUS.
ByteSource bytes_in(const std::filesystem::path& path) {
  const auto file = std::make_shared<ReadableFile>(path);
  return {.size = file->size(),
          .from_disk = [file](size_t at, void* into, size_t bytes) { file->read(at, into, bytes); }};
}

using ShardMap = std::map<std::string, std::string>;  // tensor -> file

ShardMap read_index(const std::filesystem::path& index) try {
  const auto map = Json::parse(read_file(index)).at("weight_map").get<ShardMap>();
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

std::vector<TensorFile> split_into_shards(const TensorFile& file, size_t most_bytes) {
  std::vector<TensorFile> shards(1, {.tensors = {}, .metadata = file.metadata});
  size_t bytes = 0;
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

std::string shard_name(const std::string& stem, size_t i, size_t shards) {
  return concat(stem, "-", std::setfill('0'), std::setw(5), i + 1, "-of-", std::setw(5), shards, ".safetensors");
}

std::string index_of_shards(const std::string& stem, const std::vector<TensorFile>& shards) {
  size_t bytes = 0;
  auto map = Json::object();
  for (size_t i = 0; i < shards.size(); ++i)
    for (const auto& [name, tensor] : shards[i].tensors) {
      map[name] = shard_name(stem, i, shards.size());
      bytes += tensor.nbytes();
    }
  return Json{{"metadata", {{"total_size", bytes}}}, {"weight_map", map}}.dump(2) + "\n";
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
