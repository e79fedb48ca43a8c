// SPDX-License-Identifier: Apache-2.0
// cli/installation.h: where this program is installed, and whether the libtorch it needs is there
// (cmake/InstallLockstep.cmake says where that may be).
#pragma once

#include <filesystem>

namespace lockstep {

// PREFIX of PREFIX/bin/lockstep, or the build folder.
std::filesystem::path installation_prefix();

// The file that find_package(lockstep) reads; a build folder has none.
std::filesystem::path cmake_package();

// Makes sure that the programs which this one becomes find libtorch: beside the installation, or where the script of a wheel
// has found it (LOCKSTEP_TORCH_DIR). Throws SystemError: there is none, or one of another release. Without this the loader
// would end the program with a message about symbols.
void find_torch();

}  // namespace lockstep
