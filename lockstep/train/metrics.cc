// SPDX-License-Identifier: Apache-2.0
#include "lockstep/train/metrics.h"

#include <nlohmann/json.hpp>

#include "lockstep/error.h"

namespace lockstep {

using Json = nlohmann::ordered_json;  // NaN and infinity are written as null

MetricsFile::MetricsFile(const std::string& path, bool append)
    : path_(path), out_(path, append ? std::ios::app : std::ios::trunc) {
  if (!out_) throw system_error("write the metrics to", path);
}

void MetricsFile::line(const std::string& json) {
  if (path_.empty()) return;
  out_ << json << '\n' << std::flush;
  if (!out_) throw system_error("write the metrics to", path_);
}

void MetricsFile::write(const StepMetrics& m) {
  line(Json{{"event", "step"},
            {"epoch", m.epoch},
            {"step", m.step},
            {"loss", m.loss},
            {"seconds", m.seconds},
            {"samples", m.samples}}
           .dump());
}

void MetricsFile::write(const EpochMetrics& m) {
  line(Json{{"event", "epoch"},
            {"epoch", m.epoch},
            {"seconds", m.seconds},
            {"samples", m.samples},
            {"samples_per_second", m.samples_per_second()},
            {"train_loss", m.train_loss},
            {"val_loss", m.val_loss},
            {"val_accuracy", m.val_accuracy}}
           .dump());
}

void MetricsFile::write_resume(std::int64_t step) { line(Json{{"event", "resume"}, {"step", step}}.dump()); }

void MetricsFile::write(const RunMetrics& m) {
  Json run = {{"event", "run"},
              {"strategy", m.strategy},
              {"model", m.model},
              {"data", m.data},
              {"ranks", m.ranks},
              {"devices", m.devices},
              {"epochs", m.epochs},
              {"steps", m.steps},
              {"samples", m.samples},
              {"seconds", m.seconds},
              {"train_loss", m.train_loss},
              {"val_accuracy", m.val_accuracy},
              {"data_seconds", m.loading.wait},
              {"data_read_seconds", m.loading.read},
              {"data_assemble_seconds", m.loading.assemble},
              {"data_copy_seconds", m.loading.copy},
              {"data_room_seconds", m.loading.room},
              {"data_queue_depth", m.loading.mean_queued()},
              {"data_skipped", m.loading.skipped},
              {"forward_seconds", m.forward_seconds},
              {"backward_seconds", m.backward_seconds},
              {"exchange_seconds", m.exchange_seconds},
              {"update_seconds", m.update_seconds}};
  for (const auto& [name, value] : m.measured) run[name] = value;
  line(run.dump());
}

}  // namespace lockstep
