// SPDX-License-Identifier: Apache-2.0
// collective/shm/connect/socket_folder.h: a folder that only this user can enter, for the socket at which the ranks of a machine connect.
//
// Owns:    nothing; the caller removes the folder and holds its lock until then
// Threads: any
// Ranks:   the server's only
#pragma once

#include <filesystem>

#include "lockstep/base/unique_fd.h"

namespace lockstep::shm {

// A new folder with mode 0700, locked. Removes folders of this user whose owners were killed. Throws SystemError.
std::filesystem::path make_socket_folder(UniqueFd& lock);

}  // namespace lockstep::shm
