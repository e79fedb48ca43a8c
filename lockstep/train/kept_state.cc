// SPDX-License-Identifier: Apache-2.0
#include "lockstep/train/kept_state.h"

#include <sys/mman.h>

#include "lockstep/base/program_identity.h"
#include "lockstep/base/text.h"
#include "lockstep/error.h"
#include "lockstep/train/snapshot.h"

namespace lockstep {
namespace {

const std::string kImage = "state";
constexpr const char* kProgram = "lockstep.program";

FileImage new_image() {
  UniqueFd fd(::memfd_create("lockstep state", MFD_CLOEXEC));
  if (!fd) throw system_error("make shared memory for", "the state of the run");
  return FileImage(std::move(fd));
}

// Nothing: it is not whole, because its rank was lost while it wrote.
std::optional<CheckpointFolder::Loaded> open_image(const JobMemory::Kept& kept) try {
  const std::string path = concat("/proc/self/fd/", kept.fd.get());
  return CheckpointFolder::Loaded{path, CheckpointReader(path, Checksum::kRequired)};
} catch (const Error&) {
  return {};
}

// What one build has in memory may mean something else to another one.
void require_same_program(const CheckpointReader& image) {
  const auto kept_by = image.metadata().find(kProgram);
  const std::string mine = program_identity();
  if (kept_by != image.metadata().end() && kept_by->second != mine)
    throw CheckpointError({.what = concat("the state in memory is that of another program: ", kept_by->second),
                           .here = mine,
                           .likely = "the program, lockstep or libtorch was replaced while the job ran",
                           .next = "end the job, and start it again with --resume"});
}

}  // namespace

KeptState::KeptState(JobMemory& memory) : memory_(memory), images_{new_image(), new_image()} {
  for (const FileImage& image : images_) memory.keep(kImage, image.fd());
}

void KeptState::save(TensorFile file, const FetchTensor& fetch) {
  for (auto& [name, tensor] : file.tensors)
    if (tensor.is_meta()) tensor = fetch(name);
  file.metadata[kProgram] = program_identity();
  FileImage& image = images_[saves_ % images_.size()];
  image.copy({file});
  image.finish();
  if (++saves_ == 1) memory_.complete();
}

std::optional<CheckpointFolder::Loaded> KeptState::newest(JobMemory& memory) {
  std::optional<CheckpointFolder::Loaded> newest;
  for (const JobMemory::Kept& kept : memory.previous()) {
    if (kept.name != kImage) continue;
    auto found = open_image(kept);
    if (found) require_same_program(found->file);
    if (found && (!newest || step_of(found->file) > step_of(newest->file))) newest = std::move(found);
  }
  return newest;
}

}  // namespace lockstep
