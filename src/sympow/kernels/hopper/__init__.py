"""The attention form on Hopper (sm_90) in Gluon, Triton's language of explicit schedules: heads of 64, bfloat16."""
