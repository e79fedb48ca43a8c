// SPDX-License-Identifier: Apache-2.0
#include "lockstep/base/process/process_title.h"

#include <sys/prctl.h>

#include <cstring>

#include "lockstep/base/text.h"

namespace lockstep {
namespace {

struct TitleRoom {
  char* at = nullptr;  // the blanks at the end of argv[0]
  size_t size = 0;     // 0: there are none
  size_t used = 0;     // by what stands there now
  size_t rest = 0;     // bytes after it: the other arguments, each with its zero
};

// The arguments lie one after another, where the kernel has put them and shows them.
TitleRoom find_room(int argc, char** argv) {
  const std::string_view name = argv[0];
  TitleRoom room{.at = argv[0] + name.find_last_not_of(' ') + 1};
  room.size = room.used = static_cast<size_t>(argv[0] + name.size() - room.at);
  if (room.size < kRoomForRank) return {};
  const char* const last = argv[argc - 1];
  room.rest = static_cast<size_t>(last + std::strlen(last) + 1 - (room.at + room.size));
  return room;
}

// Fills the room that `text` leaves at the end, where ps shows nothing.
void put_in_room(int argc, char** argv, const std::string& text) {
  static TitleRoom room = find_room(argc, argv);
  if (room.size == 0 || text.size() > room.size) return;
  std::memmove(room.at + text.size(), room.at + room.used, room.rest);
  std::memcpy(room.at, text.data(), text.size());
  std::memset(room.at + text.size() + room.rest, 0, room.size - text.size());
  room.used = text.size();
}

}  // namespace

void show_rank(int argc, char** argv, int rank, int ranks) {
  // Without a space: Slurm reads /proc/PID/stat by words, and would not find the process to signal or kill it.
  ::prctl(PR_SET_NAME, concat("lockstep-r", rank).c_str());
  put_in_room(argc, argv, concat(" [rank ", rank, " of ", ranks, "]"));
}

void show_no_rank(int argc, char** argv) { put_in_room(argc, argv, ""); }

}  // namespace lockstep
