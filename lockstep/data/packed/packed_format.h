// SPDX-License-Identifier: Apache-2.0
// data/packed/packed_format.h: what writer and reader of packed records must agree on; docs/data.md shows it as a table.
// Numbers are little-endian.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <string_view>

#include <torch/types.h>

namespace lockstep::packed {

constexpr std::string_view kBegin = "LSTEPREC";
constexpr std::string_view kEnd = "LSTEPEND";
constexpr std::uint64_t kVersion = 1;
constexpr std::uint64_t kHeaderBytes = 16;   // kBegin, kVersion
constexpr std::uint64_t kEntryBytes = 24;    // offset, bytes, checksum of a record
constexpr std::uint64_t kTrailerBytes = 32;  // offset of the index, number of records, checksum of the index, kEnd
constexpr std::uint64_t kAlignment = 8;      // of records

constexpr std::uint64_t kRecordHeaderBytes = 16;  // target, kind, dtype, dimensions, 5 zeros; then 8 bytes a dimension
constexpr std::uint8_t kArray = 0;
constexpr std::uint8_t kEncodedImage = 1;
constexpr std::size_t kMostDimensions = 8;

constexpr std::array kDtypes = {torch::kUInt8,   torch::kInt8,     torch::kInt16,   torch::kInt32,  torch::kInt64,
                                torch::kFloat16, torch::kBFloat16, torch::kFloat32, torch::kFloat64};

constexpr const char* kInfoFile = "packed.json";
constexpr const char* kFormatName = "lockstep packed records";

inline std::uint64_t number_at(const std::uint8_t* bytes) {
  std::uint64_t number = 0;
  std::memcpy(&number, bytes, sizeof number);
  return number;
}

}  // namespace lockstep::packed
