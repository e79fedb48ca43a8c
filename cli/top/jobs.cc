// SPDX-License-Identifier: Apache-2.0
#include "cli/top/jobs.h"

#include <dirent.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <map>

#include "lockstep/base/files/file.h"
#include "lockstep/base/files/proc_file.h"
#include "lockstep/base/text.h"
#include "lockstep/error.h"
#include "lockstep/observe/trace.h"

namespace lockstep::top {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kPageLink = "/memfd:lockstep-page";

std::string readable(std::string text) {
  for (char& each : text)
    if (each < ' ' || each > '~') each = each == 0 ? ' ' : '?';
  return text;
}

std::vector<std::string> command_of(int pid) {
  std::vector<std::string> words;
  for (std::string& word : split(file_of(pid, "cmdline"), '\0')) {
    while (word.ends_with(' ')) word.pop_back();  // room for a title
    if (!word.empty()) words.push_back(readable(std::move(word)));
  }
  return words;
}

// "lockstep run -- python -u train.py" -> "train.py"; "lockstep train --ranks 2" -> "lockstep train"
std::string name_of_program(const std::vector<std::string>& command) {
  auto word = std::find(command.begin(), command.end(), "--");
  word = word == command.end() ? command.begin() : word + 1;
  if (word == command.end()) return "?";
  const std::string program = fs::path(*word).filename();
  if (!program.starts_with("python")) return program;
  const auto script = std::find_if(word + 1, command.end(), [](const auto& each) { return !each.starts_with('-'); });
  return script == command.end() ? program : fs::path(*script).filename().string();
}

// A folder of /proc that has numbers. Names are looked up within the folder: from the root it takes several times as long.
class NumberedFolder {
 public:
  explicit NumberedFolder(const std::string& path) : folder_(::opendir(path.c_str()), &::closedir) {}

  // `take` gets each number and its name.
  template <class Take>
  void for_each(const Take& take) const {
    if (!folder_) return;
    while (const dirent* const entry = ::readdir(folder_.get()))
      if (int number = 0; parse_int(entry->d_name, number)) take(number, entry->d_name);
  }

  bool is_ours(const char* name) const {
    struct stat found {};
    return ::fstatat(::dirfd(folder_.get()), name, &found, 0) == 0 && found.st_uid == ::geteuid();
  }

  bool links_to_page(const char* name) const {
    std::array<char, kPageLink.size()> link{};
    const ssize_t length = ::readlinkat(::dirfd(folder_.get()), name, link.data(), link.size());
    return length == std::ssize(link) && std::string_view(link.data(), link.size()) == kPageLink;
  }

 private:
  std::unique_ptr<DIR, int (*)(DIR*)> folder_;
};

struct Page {
  int pid;  // of its maker
  std::shared_ptr<const JobPage> page;

  bool is_of_rank() const { return page->header().ranks == 1 && page->record(0).pid == pid; }
};

// A forked child has its parent's descriptors: the page is its maker's.
void add_pages_of(int pid, std::vector<Page>& pages, std::vector<int>& unreadable) {
  std::vector<Page> found;
  const NumberedFolder descriptors(concat("/proc/", pid, "/fd"));
  descriptors.for_each([&](int fd, const char* name) {
    if (!descriptors.links_to_page(name)) return;
    try {
      auto page = std::make_shared<const JobPage>(JobPage::open(concat("/proc/", pid, "/fd/", fd)));
      if (page->header().launcher == pid) found.push_back({pid, std::move(page)});
    } catch (const DataError&) {
      unreadable.push_back(pid);
    } catch (const SystemError&) {  // it has ended
    }
  });
  const bool launches = std::ranges::any_of(found, [](const Page& each) { return !each.is_of_rank(); });
  std::ranges::copy_if(found, std::back_inserter(pages),
                       [&](const Page& each) { return launches != each.is_of_rank(); });
}

Job job_of(const Page& page) {
  const JobPageHeader& header = page.page->header();
  const std::vector<std::string> command = command_of(page.pid);
  Job job{.number = page.pid,
          .name = name_of_program(command),
          .command = join(command, " "),
          .started_at = header.started_at,
          .world_size = header.world_size,
          .nodes = header.nodes,
          .node_rank = header.node_rank};
  for (int seat = 0; seat < header.ranks; ++seat) job.seats.push_back({page.page, seat});
  return job;
}

void merge(Job& into, const Job& other) {
  if (other.number < into.number) {
    into.number = other.number;
    into.command = other.command;
    into.name = other.name;
  }
  into.started_at = std::min(into.started_at, other.started_at);
  into.seats.insert(into.seats.end(), other.seats.begin(), other.seats.end());
}

std::vector<Job> jobs_of(const std::vector<Page>& pages) {
  std::map<std::string, Job> jobs;
  for (const Page& page : pages) {
    const std::string meeting =
        page.is_of_rank() ? concat("rank of ", page.page->header().job.data()) : concat(page.pid);
    const auto [at, is_new] = jobs.try_emplace(meeting, job_of(page));
    if (!is_new) merge(at->second, job_of(page));
  }
  std::vector<Job> sorted;
  for (auto& [meeting, job] : jobs) sorted.push_back(std::move(job));
  const auto rank_of = [](const Seat& seat) { return seat.record().job_rank.load(); };
  for (Job& job : sorted) std::ranges::sort(job.seats, {}, rank_of);
  std::ranges::sort(sorted, {}, &Job::number);
  return sorted;
}

UsageError no_such_job(const std::string& name, const std::vector<Job>& jobs) {
  std::vector<std::string> running;
  for (const Job& job : jobs) running.push_back(concat(job.number, " (", job.name, ")"));
  return UsageError({.what = concat("there is no job ", name, " of this user on this machine"),
                     .here = running.empty() ? "no job is running" : concat("running: ", join(running, ", ")),
                     .likely = "it has ended, or is another user's, whose jobs can't be seen",
                     .next = "`lockstep top` shows the jobs"});
}

}  // namespace

Found find_jobs() {
  std::vector<Page> pages;
  Found found;
  const NumberedFolder processes("/proc");
  processes.for_each([&](int pid, const char* name) {
    if (processes.is_ours(name)) add_pages_of(pid, pages, found.unreadable);
  });
  found.jobs = jobs_of(pages);
  return found;
}

Job find_job(const std::string& number_or_name) {
  const std::vector<Job> all = find_jobs().jobs;
  std::vector<Job> named;
  for (const Job& job : all)
    if (concat(job.number) == number_or_name || job.name == number_or_name) named.push_back(job);
  if (named.empty()) throw no_such_job(number_or_name, all);
  if (named.size() == 1) return named.front();
  std::vector<std::string> numbers;
  for (const Job& job : named) numbers.push_back(concat(job.number));
  throw UsageError({.what = concat(named.size(), " jobs have the name ", number_or_name),
                    .next = concat("give a number: ", join(numbers, ", "))});
}

std::string file_of(int pid, const std::string& name) try {
  return read_file(concat("/proc/", pid, "/", name));
} catch (const SystemError&) {
  return "";
}

// By the main thread's file: the process's own sums up all threads.
char state_of(int pid) try {
  const char state = fields_of_stat(concat("/proc/", pid, "/task/", pid, "/stat")).front()[0];
  return state == 'Z' || state == 'X' ? '\0' : state;
} catch (const SystemError&) {
  return 0;
}

bool has_ended(const Job& job) {
  return state_of(job.number) == 0 && std::ranges::none_of(job.seats, [](const Seat& seat) {
           const int pid = seat.record().pid;
           return pid != 0 && state_of(pid) != 0;
         });
}

}  // namespace lockstep::top
