// SPDX-License-Identifier: Apache-2.0
// checkpoint/safetensors.h: the bytes of a safetensors file; see lockstep/checkpoint.h.
//
// Threads: any
// Ranks:   no communication
#pragma once

#include <string>

#include "lockstep/checkpoint.h"

namespace lockstep {

// Throws UsageError for a dtype that the format does not know.
std::string to_safetensors(const TensorFile& file);

// Other tools write no checksum; lockstep's own files always have one.
enum class Checksum { kRequired, kOptional };

// Every length and offset is checked before it is used. Throws CheckpointError naming `origin` and what is wrong.
TensorFile from_safetensors(const std::string& bytes, const std::string& origin,
                            Checksum checksum = Checksum::kOptional);

}  // namespace lockstep
