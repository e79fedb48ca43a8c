// SPDX-License-Identifier: Apache-2.0
// train/event_file.h: the records of TensorBoard's event files: TFRecords of tensorflow.Event (event.proto, summary.proto and
// the hparams plugin's plugin_data.proto).
//
// Flow:    train/curves.h -> here -> the bytes of a file *tfevents*
// Threads: any
// Ranks:   no communication
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

namespace lockstep::events {

// When an event was: seconds since 1970, and the step of the run.
struct Moment {
  double time = 0;
  std::int64_t step = 0;
};

struct Scalar {
  std::string tag;
  double value = 0;  // written as float32
};

// Each returns one record.
std::string version(const Moment& moment);        // the first of every file
std::string session_start(const Moment& moment);  // TensorBoard forgets what earlier files say about later steps
std::string scalars(const Moment& moment, const std::vector<Scalar>& scalars);
std::string text(const Moment& moment, const std::string& tag, const std::string& markdown);

// values: an object of numbers, truth values and texts. metrics: tags of the scalars that compare runs.
std::string hparams(const Moment& moment, const nlohmann::ordered_json& values,
                    const std::vector<std::string>& metrics);
std::string hparams_end(const Moment& moment, bool success);

}  // namespace lockstep::events
