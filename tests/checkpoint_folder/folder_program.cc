// SPDX-License-Identifier: Apache-2.0
// Does with a checkpoint folder what tests/checkpoint_folder/fuzz.py tells it, each line in a process of its own:
//
//   [stop] OPERATION; OPERATION …      stop: first wait for SIGCONT
//   open FOLDER   save STEP TAG SHARDS   newest   back STEP   list FOLDER
//
// Answers "pid N", a line for each operation, and "end STATUS" as waitpid() has it. A checkpoint's tensors all have the value TAG.
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <iostream>
#include <regex>
#include <sstream>

#include "lockstep/base/text.h"
#include "lockstep/checkpoint/checkpoint_folder.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

// More than the folder's shard_bytes, or just as much.
TensorFile state_of(int tag, bool in_shards) {
  TensorFile file = {.tensors = {}, .metadata = {{"tag", concat(tag)}}};
  for (const char* name : {"a", "b", "c", "d"}) {
    torch::Tensor& values = file.tensors[name] = torch::empty({in_shards ? 100 : 25});
    std::fill_n(values.data_ptr<float>(), values.numel(), static_cast<float>(tag));  // without threads
  }
  return file;
}

// "STEP TAG" of a checkpoint that is whole. A mixture of two is not.
std::string content_of(const fs::path& path, const CheckpointReader& file) {
  const int tag = std::stoi(file.metadata().at("tag"));
  bool whole = file.entries().size() == 4;
  for (const auto& [name, entry] : file.entries()) whole = whole && file.read(name).eq(tag).all().item<bool>();
  return concat(std::stoll(path.filename().string().substr(5)), " ", whole ? concat(tag) : "mixed");
}

std::string list(const fs::path& folder) {
  static const std::regex own(R"(step-\d{8}\.safetensors(\.index\.json)?)");
  std::vector<std::string> found{"list"};
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (entry.is_directory() || !std::regex_match(entry.path().filename().string(), own)) continue;
    try {
      found.push_back(content_of(entry.path(), CheckpointReader(entry.path(), Checksum::kRequired)));
    } catch (const Error&) {
    }
  }
  return join(found, ",");
}

class Program {
 public:
  std::string run(const std::string& operation) {
    std::istringstream words(operation);
    std::string what, path;
    int64_t step = 0;
    int tag = 0, shards = 0;
    words >> what;
    if (what == "list" && words >> path) return list(path);
    if (what == "open" && words >> path) return folder_.emplace(path, 2, size_t{400}), "opened";
    if (what == "newest") {
      const auto newest = folder_->load_newest();
      return newest ? concat("newest ", content_of(newest->path, newest->file)) : "newest none";
    }
    words >> step >> tag >> shards;
    if (what == "back") return folder_->go_back(step), "back";
    folder_->require_newest(step);
    try {
      folder_->save(step, state_of(tag, shards != 0));
    } catch (const std::exception& error) {  // training goes on, and the next save tries again
      return concat("failed ", error.what());
    }
    return "saved";
  }

 private:
  std::optional<CheckpointFolder> folder_;
};

[[noreturn]] void run_line(std::string line) {
  std::cout << "pid " << ::getpid() << std::endl;
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  ::prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY);
  if (line.starts_with("stop ")) {
    line.erase(0, 5);
    ::raise(SIGSTOP);
  }
  try {
    Program program;
    for (const std::string& operation : split(line, ';'))
      std::cout << split(program.run(operation), '\n').front() << std::endl;
  } catch (const std::exception& error) {
    std::cout << "error " << split(error.what(), '\n').front() << std::endl;
  }
  ::_exit(0);
}

}  // namespace
}  // namespace lockstep

int main() {
  for (std::string line; std::getline(std::cin, line);) {
    const pid_t child = ::fork();
    if (child == 0) lockstep::run_line(line);
    int status = 0;
    ::waitpid(child, &status, 0);
    std::cout << "end " << status << std::endl;
  }
}
