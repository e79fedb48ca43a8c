// SPDX-License-Identifier: Apache-2.0
#include "lockstep/checkpoint/safetensors.h"

#include <xxhash.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <iomanip>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "lockstep/base/file.h"
#include "lockstep/base/text.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

using Json = nlohmann::ordered_json;

static_assert(std::endian::native == std::endian::little, "safetensors is a little-endian format");

constexpr const char* kMetadata = "__metadata__";
constexpr const char* kChecksum = "lockstep.xxh3";
constexpr const char* kNoChecksum = "0000000000000000";  // what the field holds while the checksum is computed
constexpr std::size_t kLengthBytes = 8;

constexpr std::array<std::pair<torch::ScalarType, const char*>, 9> kDtypes = {{
    {torch::kFloat32, "F32"},
    {torch::kFloat64, "F64"},
    {torch::kFloat16, "F16"},
    {torch::kBFloat16, "BF16"},
    {torch::kInt64, "I64"},
    {torch::kInt32, "I32"},
    {torch::kInt16, "I16"},
    {torch::kUInt8, "U8"},
    {torch::kBool, "BOOL"},
}};

std::string dtype_name(torch::ScalarType dtype, const std::string& tensor) {
  for (const auto& [type, name] : kDtypes)
    if (type == dtype) return name;
  throw UsageError({.what = concat("safetensors has no dtype for ", tensor, " (", c10::toString(dtype), ")")});
}

CheckpointError damaged(const std::string& origin, const std::string& what) {
  return CheckpointError({.what = concat(origin, " is damaged: ", what),
                          .here = origin,
                          .likely = "an interrupted copy, a full disk, or not a safetensors file",
                          .next = "remove it to resume from the checkpoint before it"});
}

std::string hash_of(const std::string& bytes) {
  return concat(std::hex, std::setfill('0'), std::setw(16), XXH3_64bits(bytes.data(), bytes.size()));
}

// Position of the checksum's 16 digits in the header; npos in a file of another tool.
std::size_t checksum_position(const std::string& bytes, std::size_t header_end) {
  const std::string key = concat('"', kChecksum, "\":\"");
  const std::size_t found = bytes.find(key);
  return found == std::string::npos || found + key.size() + 16 > header_end ? std::string::npos : found + key.size();
}

Json make_header(const TensorFile& file) {
  Json header;
  Json& metadata = header[kMetadata] = Json::object();
  metadata[kChecksum] = kNoChecksum;
  for (const auto& [key, value] : file.metadata) metadata[key] = value;
  std::size_t offset = 0;
  for (const auto& [name, tensor] : file.tensors) {
    header[name] = {{"dtype", dtype_name(tensor.scalar_type(), name)},
                    {"shape", tensor.sizes().vec()},
                    {"data_offsets", {offset, offset + tensor.nbytes()}}};
    offset += tensor.nbytes();
  }
  return header;
}

void verify_checksum(std::string bytes, std::size_t header_end, const std::string& origin, Checksum checksum) {
  const std::size_t position = checksum_position(bytes, header_end);
  if (position == std::string::npos && checksum == Checksum::kRequired) throw damaged(origin, "it has no checksum");
  if (position == std::string::npos) return;
  const std::string recorded = bytes.substr(position, 16);
  bytes.replace(position, 16, kNoChecksum);
  if (hash_of(bytes) != recorded) throw damaged(origin, "its checksum does not match its content");
}

std::size_t read_header_length(const std::string& bytes, const std::string& origin) {
  std::uint64_t length = 0;
  if (bytes.size() < kLengthBytes) throw damaged(origin, concat("only ", bytes.size(), " bytes long"));
  std::memcpy(&length, bytes.data(), kLengthBytes);
  if (length > bytes.size() - kLengthBytes)
    throw damaged(origin, concat("its header should have ", length, " bytes, the file has ", bytes.size()));
  return length;
}

torch::ScalarType dtype_of(const std::string& name, const std::string& origin) {
  for (const auto& [type, known] : kDtypes)
    if (name == known) return type;
  throw damaged(origin, concat("unknown dtype ", name));
}

torch::Tensor read_tensor(const Json& entry, const std::string& name, std::string_view data,
                          const std::string& origin) {
  const auto shape = entry.at("shape").get<std::vector<std::int64_t>>();
  const auto offsets = entry.at("data_offsets").get<std::array<std::uint64_t, 2>>();
  const torch::ScalarType dtype = dtype_of(entry.at("dtype").get<std::string>(), origin);
  auto bytes = static_cast<std::int64_t>(c10::elementSize(dtype));
  for (const std::int64_t size : shape)
    if (size < 0 || __builtin_mul_overflow(bytes, size, &bytes)) throw damaged(origin, concat("shape of ", name));
  if (offsets[0] > offsets[1] || offsets[1] > data.size() ||
      offsets[1] - offsets[0] != static_cast<std::uint64_t>(bytes))
    throw damaged(origin, concat(name, " lies outside of the file"));
  torch::Tensor tensor = torch::empty(shape, dtype);
  if (bytes > 0) std::memcpy(tensor.data_ptr(), data.data() + offsets[0], tensor.nbytes());
  return tensor;
}

// As the format demands: in some order the tensors fill the data, without gaps, overlaps or a rest.
void check_layout(const Json& header, std::size_t data_bytes, const std::string& origin) {
  std::vector<std::array<std::uint64_t, 2>> parts;
  for (const auto& [name, entry] : header.items())
    if (name != kMetadata) parts.push_back(entry.at("data_offsets").get<std::array<std::uint64_t, 2>>());
  std::ranges::sort(parts);
  std::uint64_t end = 0;
  for (const auto& [begin, next] : parts) {
    if (begin != end || next < begin)
      throw damaged(origin, concat("its tensors overlap or leave a gap at byte ", std::min(begin, end)));
    end = next;
  }
  if (end != data_bytes) throw damaged(origin, concat("its tensors have ", end, " bytes, the file ", data_bytes));
}

TensorFile read_entries(const Json& header, std::string_view data, const std::string& origin) {
  TensorFile file;
  check_layout(header, data.size(), origin);
  for (const auto& [name, entry] : header.items())
    if (name == kMetadata)
      file.metadata = entry.get<std::map<std::string, std::string>>();
    else
      file.tensors[name] = read_tensor(entry, name, data, origin);
  file.metadata.erase(kChecksum);
  return file;
}

}  // namespace

std::string to_safetensors(const TensorFile& file) {
  std::string header = make_header(file).dump();
  header.resize((header.size() + 7) / 8 * 8, ' ');  // tensors begin at a multiple of 8
  const std::uint64_t length = header.size();
  std::string bytes(reinterpret_cast<const char*>(&length), kLengthBytes);
  bytes += header;
  for (const auto& [name, tensor] : file.tensors) {
    const torch::Tensor values = tensor.detach().to(torch::kCPU).contiguous();
    bytes.append(static_cast<const char*>(values.const_data_ptr()), values.nbytes());
  }
  bytes.replace(checksum_position(bytes, kLengthBytes + length), 16, hash_of(bytes));
  return bytes;
}

TensorFile from_safetensors(const std::string& bytes, const std::string& origin, Checksum checksum) {
  const std::size_t length = read_header_length(bytes, origin);
  const std::string_view all(bytes);
  verify_checksum(bytes, kLengthBytes + length, origin, checksum);
  try {
    return read_entries(Json::parse(all.substr(kLengthBytes, length)), all.substr(kLengthBytes + length), origin);
  } catch (const nlohmann::json::exception& error) {
    throw damaged(origin, concat("its header is not what the format says: ", error.what()));
  }
}

void save_safetensors(const std::filesystem::path& path, const TensorFile& file) {
  write_file(path, to_safetensors(file));
}

TensorFile load_safetensors(const std::filesystem::path& path) { return from_safetensors(read_file(path), path); }

}  // namespace lockstep
