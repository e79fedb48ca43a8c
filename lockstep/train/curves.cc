// SPDX-License-Identifier: Apache-2.0
#include "lockstep/train/curves.h"

#include <fcntl.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>

#include "lockstep/base/text.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

constexpr const char* kFileName = "events.out.tfevents.";

double seconds_since_1970() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

events::Moment now(std::int64_t step) { return {seconds_since_1970(), step}; }

bool has_curves(const std::filesystem::path& folder) {
  return std::ranges::any_of(std::filesystem::directory_iterator(folder),
                             [](const auto& entry) { return entry.path().filename().string().starts_with(kFileName); });
}

// TensorBoard reads the files of a folder in the order of their names: by time, to the microsecond.
UniqueFd new_event_file(const std::filesystem::path& folder, std::string& path) {
  path = folder / concat(kFileName, fixed(seconds_since_1970(), 6), ".lockstep");
  UniqueFd file(::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644));
  if (!file) throw system_error("write the curves to", path);
  return file;
}

// | option | value | ...
std::string table_of(const Json& settings) {
  std::string table = "| option | value |\n| --- | --- |\n";
  for (const auto& [name, value] : settings.items())
    table += concat("| ", name, " | ", value.is_string() ? value.get<std::string>() : value.dump(), " |\n");
  return table;
}

// What decides about the outcome of a run: what a resumed one must share, and how it was spread out.
Json hparams_of(const TrainOptions& options, std::int64_t ranks) {
  Json hparams = {{"strategy", strategy_info(options.strategy.kind).name}, {"ranks", ranks}};
  const Json fingerprint = resume_fingerprint(options);
  for (const auto& [name, value] : fingerprint.items())
    if (!value.is_null()) hparams[name] = value;
  return hparams;
}

}  // namespace

Curves::Curves(const TrainOptions& options) {
  const std::filesystem::path folder = options.tensorboard;
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error || !std::filesystem::is_directory(folder)) throw system_error("make the folder", folder);
  if (!options.resume && has_curves(folder))
    throw UsageError({.what = concat(options.tensorboard, " holds the curves of another run"),
                      .likely = "the same command as before, without --resume",
                      .next = "name another folder with --tensorboard; --resume goes on with that run"});
  std::string path;
  UniqueFd file = new_event_file(folder, path);
  writer_ = std::make_unique<BackgroundWriter>(std::move(file), path);
}

Curves::~Curves() {
  if (writer_ && !ended_) writer_->offer(events::hparams_end(now(last_step_), /*success=*/false));
}

void Curves::begin_run(std::int64_t step, const TrainOptions& options, std::int64_t ranks) {
  if (!writer_) return;
  last_step_ = step;
  writer_->offer(events::version(now(step)));
  writer_->offer(events::session_start(now(step)));
  writer_->offer(events::text(now(step), "settings", table_of(all_settings(options))));
  writer_->offer(
      events::hparams(now(step), hparams_of(options, ranks),
                      {"epoch/val_accuracy", "epoch/val_loss", "epoch/train_loss", "epoch/samples_per_second"}));
}

void Curves::add(const Json& event, std::int64_t step) {
  if (!writer_) return;
  last_step_ = step;
  std::vector<events::Scalar> scalars;
  for (const auto& [name, value] : event.items())
    if (value.is_number() && name != "epoch" && name != "step" && !std::isnan(value.get<double>()))
      scalars.push_back({concat(event.at("event").get<std::string>(), '/', name), value.get<double>()});
  writer_->offer(events::scalars(now(step), scalars));
}

void Curves::end_run(std::int64_t step) {
  if (!writer_) return;
  writer_->offer(events::hparams_end(now(step), /*success=*/true));
  writer_->finish();
  ended_ = true;
}

}  // namespace lockstep
