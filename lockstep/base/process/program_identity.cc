// SPDX-License-Identifier: Apache-2.0
#include "lockstep/base/process/program_identity.h"

#include <elf.h>
#include <link.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <filesystem>

#include "lockstep/base/cache_line.h"
#include "lockstep/base/text.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

constexpr std::size_t kBytesOfId = 8;

std::string digits_of(const unsigned char* bytes, std::size_t count) {
  std::string digits;
  for (std::size_t i = 0; i < std::min(count, kBytesOfId); ++i) {
    char two[3];
    std::snprintf(two, sizeof two, "%02x", bytes[i]);
    digits += two;
  }
  return digits;
}

// Empty: there is none among these notes.
std::string build_id_in(const unsigned char* note, const unsigned char* end) {
  while (note + sizeof(ElfW(Nhdr)) <= end) {
    const auto* const header = reinterpret_cast<const ElfW(Nhdr)*>(note);
    const unsigned char* const name = note + sizeof *header;
    const unsigned char* const value = name + round_up<std::size_t>(header->n_namesz, 4);
    if (value + header->n_descsz > end) break;
    if (header->n_type == NT_GNU_BUILD_ID && header->n_namesz == 4 && std::memcmp(name, "GNU", 4) == 0)
      return digits_of(value, header->n_descsz);
    note = value + round_up<std::size_t>(header->n_descsz, 4);
  }
  return {};
}

std::string build_id_of(const dl_phdr_info& object) {
  for (int i = 0; i < object.dlpi_phnum; ++i) {
    const auto& header = object.dlpi_phdr[i];
    if (header.p_type != PT_NOTE) continue;
    const auto* const notes = reinterpret_cast<const unsigned char*>(object.dlpi_addr + header.p_vaddr);
    if (std::string id = build_id_in(notes, notes + header.p_memsz); !id.empty()) return id;
  }
  return "?";
}

// The program itself has no name in the linker's list.
std::string file_name_of(const dl_phdr_info& object) {
  if (object.dlpi_name != nullptr && *object.dlpi_name != '\0')
    return std::filesystem::path(object.dlpi_name).filename().string();
  std::error_code none;
  std::string name = std::filesystem::read_symlink("/proc/self/exe", none).filename().string();
  constexpr std::string_view kReplaced = " (deleted)";  // its file, since the start
  return name.ends_with(kReplaced) ? name.substr(0, name.size() - kReplaced.size()) : name;
}

int add_identity(dl_phdr_info* object, std::size_t, void* to) {
  auto& identity = *static_cast<std::string*>(to);
  const std::string name = file_name_of(*object);
  const bool counts = identity.empty() || name.starts_with("liblockstep") || name.starts_with("libtorch_cpu");
  if (counts) identity += concat(identity.empty() ? "" : " ", name, " ", build_id_of(*object));
  return 0;
}

}  // namespace

// The program is the first in the list.
std::string program_identity() {
  std::string identity;
  ::dl_iterate_phdr(&add_identity, &identity);
  return identity;
}

void require_same_program(const std::string& other) {
  const std::string mine = program_identity();
  if (other == mine) return;
  throw CheckpointError({.what = concat("the state in memory is that of another program: ", other),
                         .here = mine,
                         .likely = "the program, lockstep or libtorch was replaced while the job ran",
                         .next = "end the job, and start it again with --resume"});
}

}  // namespace lockstep
