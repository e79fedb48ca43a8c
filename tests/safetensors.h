// SPDX-License-Identifier: Apache-2.0
// tests/safetensors.h: safetensors files as strings.
#pragma once

#include <memory>
#include <string>

#include "lockstep/base/files/file.h"
#include "lockstep/checkpoint/safetensors.h"
#include "tests/support.h"

namespace lockstep::testing {

inline std::string to_safetensors(const TensorFile& file) {
  const TempFolder folder;
  save_safetensors(folder / "file", file);
  return read_file(folder / "file");
}

inline TensorFile from_safetensors(const std::string& bytes, const std::string& origin,
                                   Checksum checksum = Checksum::kOptional) {
  const auto kept = std::make_shared<const std::string>(bytes);
  const std::shared_ptr<const std::byte> memory(kept, reinterpret_cast<const std::byte*>(kept->data()));
  const SafetensorsReader reader({.size = bytes.size(), .mapped = memory}, origin, checksum);
  TensorFile file{.tensors = {}, .metadata = reader.metadata()};
  for (const auto& [name, entry] : reader.entries()) file.tensors[name] = reader.read(name).clone();
  return file;
}

}  // namespace lockstep::testing
