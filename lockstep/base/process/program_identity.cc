// SPDX-License-Identifier: Apache-2.0
#include "lockstep/base/process/program_identity.h"

#include <link.h>

#include <filesystem>

#include "lockstep/base/hash.h"
#include "lockstep/base/text.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

// A hash of the notes that the linker has put into it, of which one is the build ID.
std::string hash_of_notes(const dl_phdr_info& object) {
  std::string notes;
  for (int i = 0; i < object.dlpi_phnum; ++i)
    if (const auto& header = object.dlpi_phdr[i]; header.p_type == PT_NOTE)
      notes.append(reinterpret_cast<const char*>(object.dlpi_addr + header.p_vaddr), header.p_memsz);
  return concat(std::hex, hash_of(notes));
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

int add_identity(dl_phdr_info* object, size_t, void* to) {
  auto& identity = *static_cast<std::string*>(to);
  const std::string name = file_name_of(*object);
  const bool counts = identity.empty() || name.starts_with("liblockstep") || name.starts_with("libtorch_cpu");
  if (counts) identity += concat(identity.empty() ? "" : " ", name, " ", hash_of_notes(*object));
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
