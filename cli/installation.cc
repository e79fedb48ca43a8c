// SPDX-License-Identifier: Apache-2.0
#include "cli/installation.h"

#include <cstdlib>
#include <vector>

#include "lockstep/base/files/file.h"
#include "lockstep/base/text.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kTorch = LOCKSTEP_TORCH_VERSION;

// The value of __version__ in torch's version.py, such as 2.15.0+cu130.
std::string version_of(const fs::path& torch) {
  const std::string text = read_file(torch / "version.py");
  const size_t line = text.find("__version__ = '");
  if (line == std::string::npos) return "of an unknown version";
  const size_t begin = text.find('\'', line) + 1;
  return text.substr(begin, text.find('\'', begin) - begin);
}

void put_first_in(const char* variable, const fs::path& folder) {
  const char* const others = std::getenv(variable);
  ::setenv(variable, others == nullptr ? folder.c_str() : concat(folder.string(), ":", others).c_str(), 1);
}

[[noreturn]] void throw_wrong_torch(const std::string& what, const std::string& here) {
  throw SystemError({.what = what,
                     .here = here,
                     .likely = "torch was removed or updated after lockstep was installed, or never installed",
                     .next = concat("pip install torch==", kTorch, ".*, or make ", here,
                                    " a link to the folder torch/ of ", kTorch)});
}

}  // namespace

fs::path installation_prefix() { return fs::read_symlink("/proc/self/exe").parent_path().parent_path(); }

fs::path cmake_package() { return installation_prefix() / LOCKSTEP_LIBDIR / "cmake/lockstep/lockstepConfig.cmake"; }

void find_torch() {
  if (!fs::exists(cmake_package())) return;  // a build folder, which knows its torch
  std::vector<fs::path> folders{installation_prefix() / LOCKSTEP_LIBDIR / "lockstep/torch",
                                installation_prefix().parent_path().parent_path() / "torch"};
  const char* const told = std::getenv("LOCKSTEP_TORCH_DIR");
  const fs::path of_python = told == nullptr ? "" : told;
  if (!of_python.empty()) folders.push_back(of_python);
  for (const fs::path& torch : folders) {
    if (!fs::exists(torch / "lib/libtorch_cpu.so")) continue;
    const std::string version = version_of(torch);
    if (!version.starts_with(concat(kTorch, ".")))
      throw_wrong_torch(concat("this lockstep needs torch ", kTorch, " and found ", version), torch.string());
    if (torch == of_python) put_first_in("LD_LIBRARY_PATH", torch / "lib");  // the run paths have the others
    return;
  }
  throw_wrong_torch(concat("this lockstep needs torch ", kTorch, " and found none"), folders.front().string());
}

}  // namespace lockstep
